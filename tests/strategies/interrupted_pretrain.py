# SPDX-License-Identifier: Apache-2.0
"""The training program with Ctrl-C in one process at a bad moment: `--cut=N,WHERE`.

With `end` it comes by itself, as the process removes its store. Otherwise the process never sees
its KeyboardInterrupt: another exception takes its place when the signal's handler begins, as the
one may that a monitor raises in the main thread at the same moment; WHERE says how far it gets.
"""

import signal
import sys

from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main
from megatron_moevement.training.run import GenerationRun
from megatron_moevement.training.stop_request import StopSources

FLAG = "--cut="


def cut(stop, number, frame):
    if not stop._is_raised:
        raise ConnectionError("a peer is lost")


def leave(run):
    run.resident.leave()


def remove_late(store, remove=StoreDirectory.remove):
    StoreDirectory.remove = remove
    signal.raise_signal(signal.SIGINT)
    remove(store)


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(FLAG)]
    process, where = given.removeprefix(FLAG).split(",")
    if Launch.from_environment().process == int(process):
        if where == "end":
            StoreDirectory.remove = remove_late
        else:
            StopSources._interrupt = cut
        if where == "restart":
            GenerationRun.leave = leave
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
