"""Percentiles of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float | int], percent: float | int) -> float:
    """The value below which `percent` of an ascending sequence lie, interpolated linearly as NumPy does.

    Raises:
        ValueError: nothing to choose from, or a percentage outside 0 to 100.
    """
    if not ordered:
        raise ValueError("a percentile needs values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent}: must be from 0 to 100")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return float(low + (high - low) * (position - below))


def summary(values: Sequence[float | int]) -> dict[str, float | int] | None:
    """`mean`, `p50`, `p90`, `p95`, `p99`, `max` and `num`; None where nothing was measured."""
    if not values:
        return None
    ordered = sorted(values)
    found: dict[str, float | int] = {"mean": float(statistics.fmean(ordered))}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {**found, "max": float(ordered[-1]), "num": len(ordered)}
