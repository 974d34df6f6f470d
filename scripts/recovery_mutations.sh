#!/usr/bin/env bash
# Shows that a test of the bits of a recovery fails when the recovery does one thing wrongly, set-up
# included:  ./scripts/recovery_mutations.sh [PYTEST ARGUMENTS...]
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -m "slow or not slow" \
  tests/strategies/test_recovery_mutations.py "$@"
