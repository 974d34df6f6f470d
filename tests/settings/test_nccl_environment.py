# SPDX-License-Identifier: Apache-2.0
"""The environment of in-process restart over NCCL."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.nccl_environment import (
    NEEDED,
    check_environment,
    prepare_environment,
)
from megatron_moevement.settings.restart import InProcessRestart

SETTINGS = InProcessRestart(inprocess_restart=True)
LIMIT_MINUTES = 10.0


def prepared(**given):
    environment = dict(given)
    prepare_environment(SETTINGS, environment)
    return environment


def test_what_is_prepared_is_accepted():
    check_environment(SETTINGS, LIMIT_MINUTES, prepared())


def test_looking_for_a_gpu_does_not_open_it():
    assert prepared()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_connecting_ends_when_a_process_without_progress_is_interrupted():
    assert prepared()["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_user_has_set_stays_and_is_refused(name):
    environment = prepared(**{name: "2"})
    assert environment[name] == "2"
    with pytest.raises(UserError, match=f"{name}={NEEDED[name]}, and it is '2'"):
        check_environment(SETTINGS, LIMIT_MINUTES, environment)


def test_a_variable_that_was_set_too_late_is_refused():
    with pytest.raises(UserError, match="not set"):
        check_environment(SETTINGS, LIMIT_MINUTES, {})


@pytest.mark.parametrize("mode", ["1", "2"])
def test_a_watchdog_that_aborts_by_itself_is_refused(mode):
    environment = prepared(TORCH_NCCL_ASYNC_ERROR_HANDLING=mode)
    with pytest.raises(UserError, match="aborts collectives of one rank"):
        check_environment(SETTINGS, LIMIT_MINUTES, environment)


def test_a_limit_of_collectives_below_that_of_hangs_is_refused():
    with pytest.raises(UserError, match="must be longer than --inprocess-hard-timeout 90"):
        check_environment(SETTINGS, 1.5, prepared())
