#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that the simulator finds each of its mutations within 500 seeds, set-up included.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
exec .venv/bin/python -m tests.harness.mutation_check "$@"
