"""Repeated measurements in three numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float | int], *, higher_is_better: bool = False) -> dict[str, float | int]:
    """`median`, `best`, `worst` and `num` of repeated measurements.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("nothing was measured")
    best, worst = (max, min) if higher_is_better else (min, max)
    return {
        "median": float(statistics.median(values)),
        "best": float(best(values)),
        "worst": float(worst(values)),
        "num": len(values),
    }


def slope(x: Sequence[float | int], y: Sequence[float | int]) -> float:
    """The least-squares slope of y over x.

    Raises:
        ValueError: fewer than two different x.
    """
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    denominator = sum((a - mean_x) ** 2 for a in x)
    if denominator == 0:
        raise ValueError("a slope needs two different points")
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / denominator
