# SPDX-License-Identifier: Apache-2.0
"""The training program with mutations, named by its first arguments: `--mutation=NAME`."""

import sys

from megatron_moevement.training.program import main
from tests.harness import punctual_changes
from tests.harness.localized_mutations import LOCALIZED_MUTATIONS
from tests.harness.recovery_mutations import MUTATIONS
from tests.harness.schedule_mutations import SCHEDULE_MUTATIONS
from tests.harness.state_mutations import STATE_MUTATIONS

if __name__ == "__main__":
    prefix = "--mutation="
    punctual_changes.install()
    for argument in sys.argv:
        if argument.startswith(prefix):
            mutations = {**MUTATIONS, **LOCALIZED_MUTATIONS, **SCHEDULE_MUTATIONS}
            {**mutations, **STATE_MUTATIONS}[argument.removeprefix(prefix)]()
    sys.exit(main([argument for argument in sys.argv[1:] if not argument.startswith(prefix)]))
