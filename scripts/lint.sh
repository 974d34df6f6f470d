#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every linter, set-up included, and fails at the end if one of them found something.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
PATH="$ROOT/.venv/bin:$PATH"
failed=()

check() {
    echo "lint: $*"
    "$@" || failed+=("$1")
}

# Linters that come as a binary, for some machines only.
check_if_installed() {
    if command -v "$1" >/dev/null; then
        check "$@"
    else
        echo "lint: skipped, not available for $(uname -m): $*"
    fi
}

check ruff check .
check ruff format --check .
check mypy
check lint-imports
check python tests/engineering/licence_headers.py --check
check_if_installed shellcheck scripts/*.sh scripts/*.sbatch .ci/run
check_if_installed hadolint Dockerfile
if [ "${#failed[@]}" -gt 0 ]; then
    echo "lint: failed: ${failed[*]}" >&2
    exit 1
fi
