# SPDX-License-Identifier: Apache-2.0
"""Every flag of in-process restart arrives at NVRx; times that it refuses are refused before."""

import dataclasses
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia_resiliency_ext.inprocess.store import BarrierOverflow, BarrierTimeout

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.nvrx import restarter
from megatron_moevement.integrations.nvrx.rank_assignment import lacking_spares
from megatron_moevement.policy.outcome.futility import Futility
from megatron_moevement.runtime.coordination.generation import Interruption
from megatron_moevement.runtime.coordination.roll_call import _Notes
from megatron_moevement.runtime.peers.log_reader import LogReadError
from megatron_moevement.runtime.peers.sender import FetchError
from megatron_moevement.runtime.peers.state_reader import StateReadError
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.restart import Granularity, InProcessRestart, check_restart
from megatron_moevement.settings.secret import Secret

LAUNCH = Launch(
    rank=0, local_rank=0, world_size=2, store=("127.0.0.1", 1), control_store=("127.0.0.1", 2)
)
TIMES = [
    field.name
    for field in dataclasses.fields(InProcessRestart)
    if field.name.endswith(("_interval", "_timeout", "_wait", "_time"))
]


@pytest.fixture(autouse=True)
def unpatched(monkeypatch):
    """Leaves torch's waits as they are: nothing runs here."""
    monkeypatch.setattr(restarter, "make_waits_interruptible", lambda: None)


def wrapper(flags):
    """Returns NVRx's wrapper as the program makes it."""
    what = restarter.Restartable(
        *(lambda *_: None, None, lambda: None, Futility, lambda: None),
        *("gloo", Interruption(), "here"),
    )
    parts = (what, flags, LAUNCH)
    connection = restarter._connection(LAUNCH, flags.times["barrier_timeout"])
    return restarter._wrapper(
        *parts,
        processes=(0, 1),
        store_kwargs=connection,
        await_watched=lambda: None,
        ends=lambda _: {},
    )


def test_each_time_is_the_wrappers():
    defaults = InProcessRestart(inprocess_restart=True)
    seconds = {name: getattr(defaults, name) + 0.25 for name in TIMES}
    made = wrapper(dataclasses.replace(defaults, **seconds))
    found = {name: getattr(made, name.removeprefix("inprocess_")) for name in TIMES}
    assert {name: time.total_seconds() for name, time in found.items()} == seconds
    assert len(TIMES) == 11


def test_the_other_flags_are_the_wrappers_parts():
    made = wrapper(
        InProcessRestart(
            inprocess_restart=True,
            inprocess_max_iterations=7,
            inprocess_granularity=Granularity.NODE,
            inprocess_empty_cuda_cache=True,
        )
    )
    assert made.initialize.max_restarts == 7
    assert made.finalize.empty_cuda_cache
    assert len(made.rank_assignment.layers) == 2
    assert made.health_check is not None
    assert made.store_kwargs["timeout"] == made.barrier_timeout
    assert len(wrapper(InProcessRestart()).rank_assignment.layers) == 1


LARGE = {"soft_timeout": 2, "heartbeat_timeout": 2, "hard_timeout": 3, "barrier_timeout": 4}
DRAWN = {
    name: st.sampled_from([LARGE.get(name.removeprefix("inprocess_"), 1) + s for s in (0, 0.5, 1)])
    for name in TIMES
}


@settings(max_examples=500)
@given(st.fixed_dictionaries(DRAWN))
def test_what_passes_our_check_passes_that_of_the_wrapper(times):
    flags = dataclasses.replace(InProcessRestart(inprocess_restart=True), **times)
    try:
        check_restart(flags)
    except UserError:
        return
    wrapper(flags)


@pytest.mark.parametrize("name", TIMES)
def test_what_the_wrapper_refuses_our_check_refuses_in_one_line(name):
    for seconds in (0.01, 1.0, 59.9, 60.0, 89.9, 90.0, 119.9, 120.0, 500.0):
        flags = dataclasses.replace(InProcessRestart(inprocess_restart=True), **{name: seconds})
        try:
            wrapper(flags)
        except ValueError:
            with pytest.raises(UserError, match="must be less than"):
                check_restart(flags)


@pytest.mark.parametrize(
    ("sizes", "active", "is_said"),
    [
        ({}, 4, False),
        ({"a": 2, "b": 1}, 4, False),  # which is too few to begin
        ({"a": 2, "b": 2}, 4, True),
        ({"a": 2, "b": 2, "c": 1}, 4, True),
        ({"a": 2, "b": 3}, 4, True),
        ({"a": 4, "b": 6}, 8, True),
        ({"a": 4, "b": 4, "c": 4}, 8, False),
    ],
)
def test_spares_that_could_not_replace_a_domain_are_named(sizes, active, is_said):
    said = lacking_spares(sizes, active)
    assert (said is not None) == is_said
    has_spares = sum(sizes.values()) > active
    assert said is None or ("--inprocess-granularity rank" in said) == has_spares


@pytest.mark.parametrize("kind", [FetchError, LogReadError, StateReadError])
def test_a_peer_that_is_lost_while_others_read_from_it_takes_one_line(caplog, kind):
    error = kind("slot 0 can't be had from process 1: the peer hung up")
    error.__cause__ = ConnectionResetError("the peer hung up")
    restarter._tell(2, 4, error)
    (record,) = caplog.records
    assert record.exc_info is None
    assert kind.__name__ in record.message


def test_a_failure_of_our_own_is_told_with_its_traceback(caplog):
    restarter._tell(2, 4, LookupError("no such thing"))
    assert caplog.records[0].exc_info[1].args == ("no such thing",)


@pytest.mark.parametrize(
    ("outcome", "error", "is_called_again"),
    [
        ("again", BarrierTimeout, True),
        ("again", dist.DistStoreError, True),
        ("again", BarrierOverflow, False),  # which has other causes
        ("holds", BarrierTimeout, False),
        ("holds", dist.DistStoreError, False),
    ],
)
def test_who_meets_nobody_in_time_calls_the_roll_again_if_the_others_do(
    monkeypatch, outcome, error, is_called_again
):
    store, attempts = dist.HashStore(), []
    launch = dataclasses.replace(LAUNCH, processes=3, secret=Secret(b"s" * 64))
    notes = _Notes(store, launch.secret, launch.attempt)
    notes.agreed("moevement/roll0/called", [[0, 2]])
    notes.agreed("moevement/roll1/called", [[0, 0], [2, 2]])

    def attempt():
        attempts.append(os.environ["WORLD_SIZE"])
        if len(attempts) == 1:
            notes.agreed("moevement/roll0/outcome", outcome)
            raise error("the time is over")
        return "trained"

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(restarter, "_prepare_process", lambda _: None)
    monkeypatch.setattr(restarter, "ControlStore", lambda **_: SimpleNamespace(connection=store))
    monkeypatch.setattr(restarter, "mend_reserve", lambda *_: None)
    made = Mock(return_value=attempt, initialize=Mock(has_begun=False))
    monkeypatch.setattr(restarter, "_wrapper", lambda *_, **__: made)
    flags = InProcessRestart(inprocess_restart=True, inprocess_monitor_process_interval=0.01)
    what = Mock(interruption=Interruption())
    if is_called_again:
        assert restarter.run_restartable(what, flags, launch) == "trained"
        assert attempts == ["3", "2"]
    else:
        with pytest.raises(restarter.RestartsEndedError):
            restarter.run_restartable(what, flags, launch)
