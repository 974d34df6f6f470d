#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks on one GPU everything of the project that a GPU can show, part by part, each in less than 8
# minutes; without a GPU, what a CPU can show of it:
#   ./scripts/gpu_check.sh [--part NAME...] [--again] [--small] [--results FOLDER]
#   ./scripts/gpu_check.sh --report      (the table of what was found; --help names the parts)
# Run again, it goes on where it was. Nothing is installed or fetched: PYTHON names an interpreter that
# has torch, the fork and this package's dependencies (default: that of .venv, or else python3).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [ -z "${PYTHON:-}" ]; then
    PYTHON="$ROOT/.venv/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python3
fi
cd "$ROOT"
exec "$PYTHON" -W ignore -m tests.harness.gpu_check "$@"
