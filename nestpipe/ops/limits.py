"""Limits of the kernels, apart from them so that a configuration is checked without torch."""

MAX_BUCKETS = 255  # of time biases: a bucket fits into a byte
