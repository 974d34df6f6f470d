"""The training program: arguments, data, presets, loop, checkpoints, reporting."""
