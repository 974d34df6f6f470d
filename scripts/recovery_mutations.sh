#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that a test of the bits of a recovery fails when the recovery does one thing wrongly, set-up
# included:  ./scripts/recovery_mutations.sh [PYTEST ARGUMENTS...]
# Prints a line `red: MUTATION: HOW` for each; fails when one is not seen.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q -s -m "slow or not slow" -k "mutat or test_a_slot_that_differs" \
    tests/strategies/test_recovery_mutations.py tests/strategies/test_localized.py \
    tests/strategies/test_job_plan.py tests/strategies/test_schedule_changes.py \
    tests/strategies/test_fault_cover.py "$@"
