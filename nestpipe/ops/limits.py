"""Limits of the kernels, in a torch-free module so that checking a configuration does not import torch."""

MAX_BUCKETS = 255  # time buckets are stored as bytes
