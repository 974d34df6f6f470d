# SPDX-License-Identifier: Apache-2.0
"""Security: folders of other users, and proofs of who wrote a document."""
