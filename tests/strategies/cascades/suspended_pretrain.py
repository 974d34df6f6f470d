# SPDX-License-Identifier: Apache-2.0
"""The training program that says which process watches it: `--note-monitor=FOLDER`."""

import sys
from pathlib import Path

from nvidia_resiliency_ext.inprocess.monitor_process import MonitorProcess

from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

PREFIX = "--note-monitor="


def note_monitor(file):
    begin = MonitorProcess.__init__

    def begin_and_note(self, *arguments, **options):
        begin(self, *arguments, **options)
        file.write_text(str(self.process_monitor_proc.pid))

    MonitorProcess.__init__ = begin_and_note


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    note_monitor(Path(given.removeprefix(PREFIX)) / str(Launch.from_environment().process))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
