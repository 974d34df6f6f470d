# SPDX-License-Identifier: Apache-2.0
"""The key by which processes recognise each other: from the launcher's secret, or drawn."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.secret import Secret, new_secret
from megatron_moevement.strategies.moevement.introduction import agree_on_key, offer_key
from tests.harness.interruption import Run
from tests.harness.protected_run import Case

SECRETLESS = Path(__file__).with_name("secretless_pretrain.py")


def agreed(keys):
    """Returns what processes with these keys agree on, and all that they told each other."""
    told = [offer_key(key) for key in keys]
    return [agree_on_key(key, told) for key in keys], repr(told)


def test_a_key_of_the_launchers_secret_never_travels():
    key = Secret(new_secret().encode()).derive("replication", "0")
    values, told = agreed([key, key])
    assert values == [key, key]
    assert key.hex() not in told


def test_processes_with_different_secrets_are_refused():
    for keys in ([b"a" * 32, b"b" * 32], [b"a" * 32, None]):
        with pytest.raises(UserError, match="processes have different secrets; give all the same"):
            agreed(keys)


def test_without_a_secret_all_take_what_the_first_one_drew():
    values, told = agreed([None, None])
    assert values[0] == values[1]
    assert values[0].hex() in told


def test_a_secret_is_long_is_not_shown_and_gives_a_key_for_each_purpose(monkeypatch):
    monkeypatch.setenv("MOEVEMENT_SECRET", "short")
    with pytest.raises(UserError, match="has 5 characters and needs 32"):
        Secret.from_environment()
    monkeypatch.setenv("MOEVEMENT_SECRET", "x" * 32)
    secret = Secret.from_environment()
    assert "xxx" not in repr(secret)
    names = (("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"))
    assert len({secret.derive(*name) for name in names}) == 4
    monkeypatch.delenv("MOEVEMENT_SECRET")
    assert Secret.from_environment() is None


@pytest.mark.distributed
def test_a_job_without_a_secret_says_once_what_that_means(megatron_fork_server, text, tmp_path):
    case = Case.of("vpp2 fp32 replicated no-dropout", 1)
    program = case.protected_program(megatron_fork_server, text)
    run = Run(dataclasses.replace(program, path=SECRETLESS, train_iters=4), tmp_path)
    with run.start() as job:
        result = job.wait().check()
    said = "".join(rank.stderr for rank in result.ranks)
    line = "MOEVEMENT_SECRET is not set: what listens to the job's network can take part in it"
    assert said.count(line) == 1
