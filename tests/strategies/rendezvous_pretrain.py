# SPDX-License-Identifier: Apache-2.0
"""The training program of which one process dies when it first connects: `--dies-connecting=N`.

It dies between telling the others where it listens and connecting to them.
"""

import os
import signal
import sys

import nvidia_resiliency_ext.inprocess  # noqa: F401  (derives a class from `TCPStore`)
import torch.distributed as dist

from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

PREFIX = "--dies-connecting="


class DyingStore(dist.Store):
    """A connection to the training's store that ends the process when it asks for a peer."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def set(self, key, value):
        self._store.set(key, value)

    def wait(self, keys, timeout=None):
        os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key):
        os.kill(os.getpid(), signal.SIGKILL)


def die_connecting():
    connect, (_, store_port) = dist.TCPStore, Launch.from_environment().store

    def connect_to_die(host, port, *limits):
        store = connect(host, port, *limits)
        return DyingStore(store) if port == store_port else store

    dist.TCPStore = connect_to_die


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    if Launch.from_environment().process == int(given.removeprefix(PREFIX)):
        die_connecting()
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
