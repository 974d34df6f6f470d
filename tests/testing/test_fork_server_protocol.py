# SPDX-License-Identifier: Apache-2.0
"""What a supervisor sends last arrives, whatever it leaves unread when it ends."""

import socket

from tests.harness.fork_server_protocol import Event, receive, send


def test_the_end_of_a_job_arrives_after_a_signal_that_came_too_late():
    test, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with test:
        with supervisor:
            send(supervisor, {"event": Event.JOB_ENDED.value, "orphans": []})
            send(test, {"rank": 0, "signal": 9})
        assert receive(test) == {"event": Event.JOB_ENDED.value, "orphans": []}
        assert receive(test) is None
