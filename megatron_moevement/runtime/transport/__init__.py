# SPDX-License-Identifier: Apache-2.0
"""Transport: messages between two processes that have proved who they are."""
