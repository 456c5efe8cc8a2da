"""Benchmarks: `python -m jaxinfer.bench`. Every figure comes with its limit, measured in the same run."""
