# SPDX-License-Identifier: Apache-2.0
"""What the flags say, as frozen dataclasses: standard library only, read by every layer above."""
