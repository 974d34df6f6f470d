# SPDX-License-Identifier: Apache-2.0
"""What stands in for the exception of a restart."""


class Interrupted(BaseException):
    """What a restart raises in the training thread."""
