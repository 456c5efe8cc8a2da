"""Attention of ragged query rows over a paged KV cache."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, implementation_for, paged_attention

__all__ = ["IMPLEMENTATIONS", "implementation_for", "paged_attention"]
