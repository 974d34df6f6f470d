"""Peers: slots, logs and live state between processes, over connections of their own."""
