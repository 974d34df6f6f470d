# SPDX-License-Identifier: Apache-2.0
"""A look into the index of a checkpoint's tensors before torch reads it.

torch unpickles `.metadata` whatever it names, and a checkpoint may come from anywhere.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from megatron_moevement.errors import MoEvementError

_INDEX = ".metadata"
_KNOWN = {
    "torch": {"Size", "device", "dtype", "layout", "memory_format"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""What torch and Megatron-Core write into it, by module; all number types of torch besides."""


class UnknownContentError(MoEvementError, ValueError):
    """The index names what no writer of checkpoints puts there."""


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()) and not _is_number_type(module, name):
            raise UnknownContentError(f"{_INDEX} names {module}.{name}, no part of an index")
        return super().find_class(module, name)


def check_index(checkpoint: Path) -> None:
    """Reads the index of a checkpoint and builds nothing but what an index consists of.

    Raises:
        UnknownContentError: it would have torch build something else.
        OSError: it can't be read.
        pickle.UnpicklingError: it is damaged.
    """
    with (checkpoint / _INDEX).open("rb") as file:
        _Index(file).load()


def _is_number_type(module: str, name: str) -> bool:
    import torch  # noqa: PLC0415  (whoever looks into an index has it)

    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
