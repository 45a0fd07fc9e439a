"""Checkpoints: their format, reading, background writing, remote copies, warm start."""
