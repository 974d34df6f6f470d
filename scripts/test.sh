#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests, set-up included. Arguments go to pytest, e.g. -k name, -m slow, tests/policy.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
exec .venv/bin/python -m pytest "$@"
