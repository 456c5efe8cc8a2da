"""Attention of ragged query rows over a paged KV cache."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, paged_attention

__all__ = ["IMPLEMENTATIONS", "paged_attention"]
