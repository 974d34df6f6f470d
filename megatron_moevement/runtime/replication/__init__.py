"""Copies of slots between processes, over connections of their own."""
