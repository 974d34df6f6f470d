# SPDX-License-Identifier: Apache-2.0
"""A meeting waits for who lives, and names who does not come or is gone."""

import contextlib
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.coordination.meeting import EndedError, Meeting, Note, store_at
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.secret import Secret

SECRET = Secret(b"s" * 64)
SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)
PER_NODE = 2


@pytest.fixture
def attend():
    """Returns what lets a process come; all leave at the end."""
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:

        def come(process, processes=2, patience=LONG, secret=SECRET):
            launch = Launch(0, 0, 1, process=process, processes=processes, secret=secret)
            meeting = Meeting(store, launch, patience, lambda one: one // PER_NODE)
            return stack.enter_context(meeting)

        yield come


def test_notes_come_to_whom_they_are_for(attend):
    first, second, third = (attend(process, 3) for process in range(3))
    for process, each in enumerate((first, second, third)):
        each.post(Note.GREETING, process)
    assert first.await_from(Note.GREETING) == {0: 0, 1: 1, 2: 2}
    for process in range(3):
        first.post(Note.TASK, f"for {process}", process)
    first.post(Note.GO, "now")
    for process, each in ((1, second), (2, third)):
        assert each.await_first(Note.TASK, for_me=True) == f"for {process}"
        assert each.await_first(Note.GO) == "now"


@pytest.mark.parametrize("secret", [SECRET, None])
def test_all_have_one_token_that_outsiders_lack(attend, secret):
    tokens = {attend(process, 3, secret=secret).token for process in range(3)}
    (token,) = tokens
    assert len(token) == 32
    if secret is not None:
        assert attend(0, secret=Secret(b"t" * 64)).token != token


def test_who_never_comes_is_named_with_its_node(attend):
    first = attend(0, 6, SHORT)
    for process in (1, 2):
        attend(process, 6, SHORT).post(Note.GREETING, 0)
    first.post(Note.GREETING, 0)
    with pytest.raises(UserError, match=r"of process 3, 4, 5 of 6 \(node 1, 2\)"):
        first.await_from(Note.GREETING)


def test_who_has_another_secret_has_not_come(attend):
    attend(1, secret=Secret(b"t" * 64)).post(Note.GREETING, 0)
    with pytest.raises(UserError, match=r"process 1 of 2 .* the same MOEVEMENT_SECRET"):
        attend(0, patience=SHORT).await_from(Note.GREETING, [1])


def test_who_lives_is_waited_for(attend):
    patience = timedelta(seconds=1)
    first, second = attend(0, patience=patience), attend(1, patience=patience)
    waits_s = 1.5 * patience.total_seconds()
    for poster, note in ((second, Note.REPORT), (first, Note.GO)):
        threading.Timer(waits_s, poster.post, (note, "late")).start()
    assert first.await_from(Note.REPORT, [1]) == {1: "late"}
    assert second.await_first(Note.GO) == "late"


def test_who_is_gone_is_not_waited_for(attend):
    first, second = attend(0, patience=SHORT), attend(1, patience=SHORT)
    second.post(Note.GREETING, 0)
    first.await_from(Note.GREETING, [1])
    second.close()
    with pytest.raises(UserError, match=r"no sign of life within 0\.3 s of process 1 of 2"):
        first.await_from(Note.READY, [1])


def test_a_refusal_ends_the_wait_for_all_with_its_reason(attend):
    first, second, third = (attend(process, 3) for process in range(3))
    second.post(Note.REFUSAL, "no interface ib0")
    with pytest.raises(UserError, match="process 1: no interface ib0"):
        first.await_from(Note.GREETING, [1, 2])
    ending = threading.Thread(target=first.end, args=(ExitCode.BAD_ARGUMENTS,))
    ending.start()
    with pytest.raises(EndedError) as ended:
        third.await_first(Note.GO)
    assert ended.value.code == 2
    assert [each.await_end() for each in (second, third)] == [2, 2]
    ending.join()


def test_process_0_leaves_when_the_others_have_read_how_it_ends(attend):
    first, second = attend(0), attend(1)
    second.post(Note.GREETING, 0)
    first.await_from(Note.GREETING, [1])
    codes = []
    reading = threading.Timer(0.2, lambda: codes.append(second.await_end()))
    reading.start()
    first.end(ExitCode.DONE)
    assert first._read(Note.LEFT, 1) is not None
    reading.join()
    assert codes == [0]


def test_without_process_0_the_others_end(attend):
    first = attend(0, patience=SHORT)
    second = attend(1, patience=SHORT)
    first.close()
    with pytest.raises(EndedError):
        second.await_first(Note.GO)
    assert second.await_end() == ExitCode.FAILURE


def test_what_strangers_leave_is_no_note():
    store = dist.HashStore()
    launch = Launch(0, 0, 1, process=0, processes=2, secret=SECRET)
    store.set("moevement/meeting/0/greeting/1", b"0" * 32 + b'"I am process 1"')
    with (
        Meeting(store, launch, SHORT, lambda _: 0) as meeting,
        pytest.raises(UserError, match="no sign of life"),
    ):
        meeting.await_from(Note.GREETING, [1])


def test_without_a_store_one_line_says_where_it_was_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf"no store answers at 127\.0\.0\.1:{port} within 0\.3 s"):
        store_at(("127.0.0.1", port), SHORT)
