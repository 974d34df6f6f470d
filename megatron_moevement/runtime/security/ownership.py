# SPDX-License-Identifier: Apache-2.0
"""Folders in which another user could put something else in the place of what is ours.

The owner of a folder may rename and remove what others have in it, whether it is sticky or not. So
a folder that is ours or the system's is needed, and above it none in which everybody may write,
unless it is sticky and of somebody who is trusted. A folder above that another user keeps for
itself and lends is the user's own choice.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatron_moevement.errors import UserError

_ROOT = 0


def trusted_owners() -> frozenset[int]:
    """Returns whose folders nobody else can change: our own user's, and the system's.

    In a user namespace that lacks the system's user, its folders have the overflow user.
    """
    mapped = [[int(n) for n in line.split()] for line in _read("uid_map").splitlines()]
    owners = {_ROOT, os.geteuid()}
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    if mapped and not any(first <= overflow < first + count for first, _, count in mapped):
        owners.add(overflow)
    return frozenset(owners)


def check_folder(folder: Path, flag: str) -> None:
    """Refuses a folder in which another user could put other files in the place of ours.

    Raises:
        UserError: says which folder it is.
    """
    owners = trusted_owners()
    place = folder.absolute()
    for link in (place, *place.parents):
        status = link.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in owners:
            raise UserError(f"{link} is another user's; give another {flag}")
    resolved = folder.resolve()
    if resolved.stat().st_uid not in owners:
        raise UserError(f"{folder} is another user's; give another {flag}")
    for above in (resolved, *resolved.parents):
        status = above.stat()
        if not status.st_mode & stat.S_IWOTH:
            continue
        if status.st_uid not in owners:
            raise UserError(
                f"every user may write in {above}, which is another user's; give another {flag}"
            )
        if not status.st_mode & stat.S_ISVTX:
            raise UserError(
                f"every user may write in {above}, and rename what is in it; run "
                f"`chmod o-w {above}` or give another {flag}"
            )


def _read(name: str) -> str:
    return Path("/proc/self", name).read_text(encoding="ascii")
