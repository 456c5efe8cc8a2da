"""Counters and histograms of requests, as the engine measures them. Plain Python: who exports them reads `snapshot`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# Boundaries as in vLLM's metrics of the same meaning, so that its dashboards and alerts carry over. Finer ones stand
# before its first for the gap between tokens, which small models make in a millisecond.
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds = []
    power = 1
    while power <= limit:
        bounds += [power * digit for digit in (1, 2, 5) if power * digit <= limit]
        power *= 10
    return tuple(bounds)


class Histogram:
    """How many values fell below each bound, and their sum. One thread observes; any may read."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Iterable[float | int]):
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | int, num: int = 1) -> None:
        """Count a value `num` times."""
        self._counts[bisect_left(self.bounds, value)] += num
        self._sum += value * num

    def read(self) -> HistogramValues:
        return HistogramValues(self.bounds, tuple(accumulate(self._counts.copy())), self._sum)


@dataclass(frozen=True)
class HistogramValues:
    """`cumulative[i]` values were at most `bounds[i]`; an entry after those of the bounds counts all."""

    bounds: tuple[float | int, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def num(self) -> int:
        return self.cumulative[-1]


@dataclass(frozen=True)
class MetricsSnapshot:
    """`EngineMetrics` at one moment. `finished` counts choices by finish_reason, "abort" and "error" among them."""

    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    histograms: dict[str, HistogramValues]


class EngineMetrics:
    """What an engine's requests took: written by the thread that drives the engine, read by any.

    A lock, held for a few instructions, keeps a snapshot whole.

    Args:
        max_model_len: the longest sequence, which bounds the histograms of tokens.
    """

    def __init__(self, max_model_len: int):
        lengths = one_two_five(max_model_len)
        self._lock = threading.Lock()
        self.num_computed_tokens = 0
        self._prompt_tokens = self._cached_prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0, timeout=0)
        self._queue_s = Histogram(REQUEST_BOUNDS_S)
        self._first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self._gap_s = Histogram(GAP_BOUNDS_S)
        self._per_token_s = Histogram(GAP_BOUNDS_S)
        self._request_s = Histogram(REQUEST_BOUNDS_S)
        self._request_prompt_tokens = Histogram(lengths)
        self._choice_tokens = Histogram(lengths)
        self._step_tokens = Histogram(STEP_BOUNDS_TOKENS)

    def step(self, num_tokens: int) -> None:
        """A step was dispatched with so many tokens, padding not counted."""
        with self._lock:
            self.num_computed_tokens += num_tokens
            self._step_tokens.observe(num_tokens)

    def admitted(self, queue_s: float | int) -> None:
        """A request runs for the first time."""
        with self._lock:
            self._queue_s.observe(queue_s)

    def first(self, ttft_s: float | int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt is computed and, where it asks for any, its first token read."""
        with self._lock:
            self._first_token_s.observe(ttft_s)
            self._request_prompt_tokens.observe(num_prompt_tokens)
            self._prompt_tokens += num_prompt_tokens
            self._cached_prompt_tokens += num_cached_tokens

    def tokens(self, num: int, gap_s: float | int | None) -> None:
        """A step brought a choice `num` tokens, `gap_s` after the last one if it had any."""
        with self._lock:
            self._generation_tokens += num
            if gap_s is not None:
                self._gap_s.observe(gap_s)

    def finished(self, choices: Iterable[ChoiceTimes], request_s: float | int) -> None:
        """A request has ended, for whatever reason, `request_s` seconds after it came."""
        with self._lock:
            self._request_s.observe(request_s)
            for choice in choices:
                self._finished[choice.finish_reason] += 1
                self._choice_tokens.observe(choice.num_tokens)
                if choice.num_tokens > 1:
                    self._per_token_s.observe((choice.last_s - choice.first_s) / (choice.num_tokens - 1))

    def snapshot(self) -> MetricsSnapshot:
        """All of it at one moment. Histograms are named by what they measure, as the attributes are."""
        with self._lock:
            histograms = {
                name: values.read()
                for name, values in (
                    ("queue_s", self._queue_s),
                    ("first_token_s", self._first_token_s),
                    ("gap_s", self._gap_s),
                    ("per_token_s", self._per_token_s),
                    ("request_s", self._request_s),
                    ("request_prompt_tokens", self._request_prompt_tokens),
                    ("choice_tokens", self._choice_tokens),
                    ("step_tokens", self._step_tokens),
                )
            }
            return MetricsSnapshot(
                self._prompt_tokens,
                self._cached_prompt_tokens,
                self._generation_tokens,
                dict(self._finished),
                histograms,
            )


@dataclass
class ChoiceTimes:
    """When a choice got its tokens, on the monotonic clock."""

    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str = field(default="")

    def take(self, num_tokens: int, now_s: float | int) -> float | None:
        """The choice has so many tokens by now; returns the gap since the last one, if there was one."""
        gap_s = now_s - self.last_s if self.num_tokens else None
        if not self.num_tokens:
            self.first_s = float(now_s)
        self.num_tokens, self.last_s = num_tokens, float(now_s)
        return gap_s
