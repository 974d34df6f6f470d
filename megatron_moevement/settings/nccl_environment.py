# SPDX-License-Identifier: Apache-2.0
"""What in-process restart needs of torch's and NCCL's environment variables.

Source: the usage guide of nvidia-resiliency-ext, "Known issues"; `ProcessGroupNCCL.cpp` of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from megatron_moevement.errors import UserError
from megatron_moevement.settings.restart import InProcessRestart

NEEDED = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # or the error of a lost peer ends its survivors
    "NCCL_NVLS_ENABLE": "0",  # or switches keep multicast objects with a lost peer
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # or nothing ends a wait for a peer that never connects
}
"""Variables with the only value that each may have."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORTS_BY_ITSELF = ("1", "2")
"""A rank that does so before the job is interrupted lets its neighbours read garbage."""


def prepare_environment(settings: InProcessRestart, environment: MutableMapping[str, str]) -> None:
    """Sets what is not set yet; called before torch is imported, which reads it then."""
    connecting_s = max(1, int(settings.inprocess_soft_timeout))
    wanted = {
        **NEEDED,
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(connecting_s),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or asking for a GPU opens it, before monitors fork
        "TORCH_CPP_LOG_LEVEL": "error",  # time-outs of stores that are asked again are no errors
    }
    for name, value in wanted.items():
        environment.setdefault(name, value)


def check_environment(
    settings: InProcessRestart, distributed_timeout_minutes: float, environment: Mapping[str, str]
) -> None:
    """Checks that restarts work over NCCL as the variables are.

    Raises:
        UserError: a variable has another value, or torch would end a process before NVRx does.
    """
    for name, value in NEEDED.items():
        if environment.get(name) != value:
            raise UserError(
                f"--inprocess-restart over NCCL needs {name}={value}, and it is "
                f"{environment.get(name, 'not set')!r}: unset it, or set it to {value}"
            )
    if environment.get(_ERROR_HANDLING) in _ABORTS_BY_ITSELF:
        raise UserError(
            f"--inprocess-restart over NCCL: {_ERROR_HANDLING}={environment[_ERROR_HANDLING]} "
            "aborts collectives of one rank before the others are interrupted: unset it"
        )
    if distributed_timeout_minutes * 60 <= settings.inprocess_hard_timeout:
        raise UserError(
            f"--distributed-timeout-minutes {distributed_timeout_minutes:g}: torch would end a "
            "process that waits for a hung one before the hung one is killed; it must be longer "
            f"than --inprocess-hard-timeout {settings.inprocess_hard_timeout:g} (seconds)"
        )
