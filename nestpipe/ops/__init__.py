"""Kernels on jagged tensors."""
