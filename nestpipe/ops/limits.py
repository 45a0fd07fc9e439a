"""Limits of the kernels, in a torch-free module so that checking a configuration does not import torch."""

MAX_BUCKETS = 255  # time buckets are stored as bytes
MAX_KERNEL_WIDTH = 256  # of a head's queries or values, in kernels for GPUs
