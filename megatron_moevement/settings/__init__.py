"""What the flags say, as frozen dataclasses: standard library only, read by every layer above."""
