"""Limits of the kernels, in a torch-free module so that checking a configuration does not import torch."""

MAX_BUCKETS = 255  # time buckets are stored as bytes
MAX_KERNEL_WIDTH = 256  # of a head's queries or values, in kernels for GPUs
MAX_KERNEL_LENGTH = 1 << 17  # keys of a sequence there; times the next one it fits into 31 bits
MAX_KERNEL_STRIDE = 1 << 14  # elements between two rows there
