#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts N active ranks and S spares of pretrain_moe.py on this machine, waits, and returns the
# job's exit code:  ./scripts/run_local.sh -n N [-s S] -- FLAGS...      (--help shows the rest)
# It is `moevement launch` with the Python of .venv, set up or not.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
PYTHON="$ROOT/.venv/bin/python"
[ -x "$PYTHON" ] || PYTHON=python3 # in a container the package is installed beside torch
exec "$PYTHON" -m megatron_moevement.cli.launch "$@"
