# SPDX-License-Identifier: Apache-2.0
"""The training program of which a replay is held up while it puts a slot back: `--held=SLOT,FILE`.

The first rank that comes to that slot of a window spoils everything that the slot holds, makes the
file, and waits until it is interrupted: as if it had been torn in the middle of its copies.
"""

import sys
import time
from pathlib import Path

import torch

from megatron_moevement.strategies.moevement.recovery.replay import Slots
from megatron_moevement.training.program import main

FLAG = "--held="
POLL_S = 0.02


def hold(held, file):
    put_back = Slots.put_back

    @torch.no_grad()
    def put_back_half(self, slot, live):
        if slot != held or file.exists():
            return put_back(self, slot, live)
        for part in self.layouts[slot].parts:
            for piece in live.pieces(part.operator, part.content):
                piece.live.fill_(1)
        file.touch()
        while True:
            time.sleep(POLL_S)

    Slots.put_back = put_back_half


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(FLAG)]
    slot, path = given.removeprefix(FLAG).split(",")
    hold(int(slot), Path(path))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
