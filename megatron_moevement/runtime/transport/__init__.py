"""Transport: messages between two processes that have proved who they are."""
