"""Security: folders of other users, and proofs of who wrote a document."""
