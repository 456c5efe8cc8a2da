"""Kernels and their plain-XLA references: arrays in, arrays out, one folder an operation."""
