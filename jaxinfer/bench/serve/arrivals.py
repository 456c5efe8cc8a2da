"""When requests are to be sent: an endless, reproducible sequence of moments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROCESSES = ("poisson", "fixed", "burst", "gamma")


@dataclass(frozen=True)
class Load:
    """How requests are sent, and how many.

    With a `rate` (sessions/s) or `process="burst"` the moments are given, whatever the server does (an open loop);
    `concurrency` then bounds what is under way, and what waits for a place is late. Without them `concurrency` requests
    are kept under way (a closed loop). Sending ends after `num_requests` or `duration_s`, whichever is first.

    Raises:
        ValueError: settings that are out of range or contradict each other.
    """

    rate: float | int | None = None
    process: str = "poisson"
    burstiness: float | int = 1.0
    concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise ValueError(f"arrivals {self.process!r}: must be one of {', '.join(PROCESSES)}")
        for name in ("rate", "burstiness", "concurrency", "num_requests", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: must be above 0")
        if self.process == "burst" and self.rate is not None:
            raise ValueError("a burst sends all requests at once and has no rate; leave --rate out, or use gamma")
        if self.process == "burst" and self.num_requests is None:
            raise ValueError("a burst needs a number of requests")
        if self.process != "gamma" and self.burstiness != 1.0:
            raise ValueError(f"burstiness belongs to gamma arrivals, not to {self.process}")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("give a number of requests, a duration or both")
        if not self.is_open and self.concurrency is None:
            raise ValueError("give a rate, a concurrency, or the arrivals burst")
        if self.rate is None and self.process not in ("poisson", "burst"):
            raise ValueError(f"{self.process} arrivals need a rate")

    @property
    def is_open(self) -> bool:
        """Whether the moments of sending do not depend on the answers."""
        return self.rate is not None or self.process == "burst"


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds from the start at which sessions of an open loop begin, without end; never decreasing.

    `fixed`: every 1/rate. `poisson`: exponential gaps of mean 1/rate. `gamma`: gaps of the same mean and of shape
    `burstiness`, so with a coefficient of variation of 1/√burstiness: 1 is Poisson, below 1 requests come in clumps.
    """
    if load.process == "burst":
        yield from itertools.repeat(0.0)
    if load.rate is None:
        raise ValueError("a closed loop has no arrival times")
    rng, mean_s, moment_s = random.Random(f"arrivals {load.seed}"), 1 / load.rate, 0.0
    for index in itertools.count():
        yield moment_s
        if load.process == "fixed":
            moment_s = (index + 1) * mean_s  # a product, lest rounding add up
        elif load.process == "poisson":
            moment_s += rng.expovariate(load.rate)
        else:
            moment_s += rng.gammavariate(load.burstiness, mean_s / load.burstiness)
