# SPDX-License-Identifier: Apache-2.0
"""What is decided of copies of persisted windows on slower, lasting storage."""
