#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Draws jobs and what happens to them from seeds, runs them, and judges them by what is promised:
#   ./scripts/explore.sh --seeds N --first K [--minutes M]      ./scripts/explore.sh --report
# docs/evidence/explorer.md has the rest. As root, it runs with a network, a /dev/shm and process
# numbers of its own, where only SIGKILL or Ctrl-C ends it.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
export OMP_NUM_THREADS=1
explore=(.venv/bin/python -W ignore -m tests.harness.explorer "$@")
own=(unshare --net --mount --pid --fork --kill-child --mount-proc)
if [ "$(id -u)" -eq 0 ] && "${own[@]}" true 2>/dev/null; then
    # shellcheck disable=SC2016  # the inner shell expands it
    exec "${own[@]}" bash -c '
        .venv/bin/python -c "
import fcntl, socket, struct
up = struct.pack(\"16sh\", b\"lo\", 0x1 | 0x40)
fcntl.ioctl(socket.socket(), 0x8914, up)"
        mount -t tmpfs -o size=50% tmpfs /dev/shm
        "$@"; exit "$?" # this shell stays, to reap processes whose parents were killed' explore.sh "${explore[@]}"
fi
exec "${explore[@]}"
