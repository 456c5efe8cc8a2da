"""How long one tenant waits beside another with a hundred requests: the scheduler on a device that is only a clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_manager import PageManager
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import RequestOptions, SamplingParams, SequenceState
from jaxinfer.scheduler.scheduler import Scheduler

_STEP_S, _TOKEN_S = 0.020, 0.0005  # what a step takes, and each of its tokens besides
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32


@dataclass
class Served:
    """What one run gave: the small tenant's times from arrival to last token, and both tenants' tokens over time."""

    latency_s: list[float] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=lambda: {"large": [], "small": []})


def simulate(
    num_large: int,
    *,
    fair: bool,
    num_small: int = 20,
    interval_s: float | int = 1.0,
    max_num_seqs: int = 8,
) -> Served:
    """A tenant that queues `num_large` requests at once, and one that sends a request every `interval_s`.

    Not `fair`: both are one tenant to the scheduler, so that requests are served in order of arrival.
    """
    limits = SchedulerConfig(1024, max_num_seqs, 256)
    scheduler = Scheduler(limits, PageManager(PageAllocator(1000), 16))
    served, counts, now_s = Served(), {"large": 0, "small": 0}, 0.0
    arrivals = [(0.0, "large")] * num_large + [(0.5 + index * interval_s, "small") for index in range(num_small)]
    arrivals.sort(key=lambda each: each[0])
    live: dict[SequenceState, tuple[float, str]] = {}
    num_arrived = 0
    while arrivals or live:
        if not live:
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            arrival_s, tenant = arrivals.pop(0)
            num_arrived += 1
            sequence = _sequence(num_arrived, tenant if fair else "")
            live[sequence] = arrival_s, tenant
            scheduler.add(sequence)
        rows = scheduler.schedule().rows
        now_s += _STEP_S + _TOKEN_S * sum(row.num_tokens for row in rows)
        for row in rows:
            arrival_s, tenant = live[row.sequence]
            counts[tenant] += row.num_tokens
            if not row.draws:
                continue
            row.sequence.num_pending -= 1
            row.sequence.output_ids.append(0)
            scheduler.read(row.sequence)
            if row.sequence.num_known == row.sequence.max_total_tokens:
                scheduler.finish(row.sequence)
                del live[row.sequence]
                if tenant == "small":
                    served.latency_s.append(now_s - arrival_s)
        served.time_s.append(now_s)
        for tenant, count in counts.items():
            served.tokens[tenant].append(count)
    return served


def _sequence(arrival: int, tenant: str) -> SequenceState:
    prompt = [arrival * _PROMPT_TOKENS + index for index in range(_PROMPT_TOKENS)]  # shares nothing with the others
    params, total = SamplingParams(max_tokens=_OUTPUT_TOKENS), _PROMPT_TOKENS + _OUTPUT_TOKENS
    return SequenceState(str(arrival), 0, prompt, params, total, arrival, RequestOptions(tenant=tenant))


def measure_fairness(plot: str | None = None) -> dict[str, Any]:
    """The small tenant's latency alone, and beside 100 requests with and without fairness; a picture of it to `plot`.

    Raises:
        ValueError: a picture is wanted and matplotlib is not installed.
    """
    runs = {
        "alone": simulate(0, fair=True),
        "in order of arrival": simulate(100, fair=False),
        "fair": simulate(100, fair=True),
    }
    if plot is not None:
        _draw(plot, runs)
    alone_s = statistics.median(runs["alone"].latency_s)
    return {
        "latency_s": {name: round(statistics.median(run.latency_s), 3) for name, run in runs.items()},
        "worst_latency_s": {name: round(max(run.latency_s), 3) for name, run in runs.items()},
        "over_alone": {name: round(statistics.median(run.latency_s) / alone_s, 2) for name, run in runs.items()},
    }


def _draw(path: str, runs: Mapping[str, Served]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    latency, tokens = figure.subplots(1, 2)
    for name, run in runs.items():
        latency.plot(range(1, len(run.latency_s) + 1), run.latency_s, marker="o", markersize=3, label=name)
    latency.set(xlabel="request of the small tenant", ylabel="seconds to its last token", yscale="log")
    latency.legend()
    for style, name in (("--", "in order of arrival"), ("-", "fair")):
        for tenant, color in (("large", "tab:gray"), ("small", "tab:red")):
            run = runs[name]
            tokens.plot(run.time_s, run.tokens[tenant], style, color=color, label=f"{tenant}, {name}")
    tokens.set(xlabel="seconds", ylabel="tokens served")
    tokens.legend()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
