"""How many pages the cache gets when nobody says."""

from __future__ import annotations

import jax

CPU_POOL_BYTES = 4 * 10**9


def plan_pages(page_bytes: int, *, wanted: int, needed: int, utilization: float | int) -> int:
    """Pages of the cache, the null page included: `wanted`, or as many as memory holds.

    An accelerator's pool takes what parameters already loaded leave of `utilization` times the memory that XLA manages
    there. A CPU's takes at most 4 GB, or what one sequence needs. `needed` pages hold one of the longest length.

    Raises:
        ValueError: not even `needed` pages fit on an accelerator.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats and jax.default_backend() != "cpu":
        free = int(utilization * stats["bytes_limit"]) - stats.get("bytes_in_use", 0)
        if free < (needed + 1) * page_bytes:
            raise ValueError(
                f"one sequence of max_model_len tokens needs {(needed + 1) * page_bytes / 1e9:.2f} GB of cache and "
                f"{max(free, 0) / 1e9:.2f} GB are left under gpu_memory_utilization={utilization}: lower max_model_len "
                "or raise gpu_memory_utilization"
            )
        return min(wanted + 1, free // page_bytes)
    return 1 + max(needed, min(wanted, CPU_POOL_BYTES // page_bytes))
