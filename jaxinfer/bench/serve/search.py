"""The highest request rate that a server sustains, found in a bounded number of runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """`rate` is the highest that passed, None where none did; `failed_rate` the lowest above it that did not.

    `tries` are the rates in order, with what each run gave.
    """

    rate: float | None
    failed_rate: float | None
    tries: list[tuple[float, bool]]


def find_rate(
    passes: Callable[[float], bool],
    start: float | int = 1.0,
    *,
    max_runs: int = 10,
    tolerance: float | int = 0.1,
) -> Found:
    """Double or halve from `start` until the outcome changes, then bisect geometrically.

    Ends when the failed rate is within `tolerance` of the passed one, or after `max_runs` calls of `passes`. A noisy
    `passes` never leads it outside of what it has tried: each rate runs once.

    Raises:
        ValueError: `start`, `max_runs` or `tolerance` not above 0.
    """
    if not (0 < start < math.inf and max_runs > 0 and tolerance > 0):
        raise ValueError(f"start={start}, max_runs={max_runs} and tolerance={tolerance} must be above 0")
    low, high, rate = None, None, float(start)
    tries: list[tuple[float, bool]] = []
    while len(tries) < max_runs:
        passed = passes(rate)
        tries.append((rate, passed))
        if passed:
            low = rate
        else:
            high = rate
        if low is None:
            rate /= 2
        elif high is None:
            rate *= 2
        elif high <= low * (1 + tolerance):
            break
        else:
            rate = math.sqrt(low * high)
    return Found(low, high, tries)
