# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of a job reach each other where they receive copies."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.loopback import Receiver, check_reachable

HERE = "78fa8da7-a6b0-4ae7-bb9a-eb723f567336 net:[4026531833]"
THERE = "0c8c1a0e-5b76-4f0e-9f6a-4d3d8a1c3c55 net:[4026531833]"


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "10.0.0.2"), ("10.0.0.1", "::1")]
)
def test_a_loopback_address_is_refused_on_two_machines_and_not_on_one(addresses):
    hidden = next(i for i, one in enumerate(addresses) if one.startswith(("127", "::1")))
    message = rf"^--moevement-replication-interface: process {hidden} .*{addresses[hidden]}.*give"
    with pytest.raises(UserError, match=message):
        check_reachable([Receiver(i, (HERE, THERE)[i], one) for i, one in enumerate(addresses)])
    check_reachable([Receiver(i, HERE, one) for i, one in enumerate(addresses)])


def test_an_address_of_the_network_is_taken_on_any_machines():
    check_reachable([Receiver(0, HERE, "10.0.0.1"), Receiver(1, THERE, "fe80::2%eth0")])


def test_an_ipv4_loopback_address_is_seen_as_ipv6_writes_it():
    assert Receiver(0, HERE, "::ffff:127.0.0.1").is_loopback
    assert not Receiver(0, HERE, "::ffff:10.0.0.1").is_loopback
