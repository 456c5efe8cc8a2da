"""What the server costs: the same requests through it and by `LLM` in a process of its own, in turn."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.bench.report import target
from jaxinfer.bench.serve.arrivals import Load
from jaxinfer.bench.serve.checks import make_checks, run_checks
from jaxinfer.bench.serve.in_process import InProcess
from jaxinfer.bench.serve.measure import Target, send
from jaxinfer.bench.serve.prompts import Lengths, random_sessions
from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.run import BodyFields, Run
from jaxinfer.bench.serve.server import ChildServer
from jaxinfer.bench.spread import spread

THROUGHPUT_RATIO = 0.92
LATENCY_DIFFERENCE_S = 0.003
_MEMORY_SHARE = 0.45  # two engines at a time


@dataclass(frozen=True)
class Sizes:
    """`num_requests` with `concurrency` under way, then `num_single` one at a time, `repeats` times over."""

    lengths: Lengths
    concurrency: int
    num_requests: int
    num_single: int
    repeats: int
    seed: int = 0


@dataclass
class _Found:
    """What the repeats gave. `single_s` has the latencies of each side, and their difference request by request."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "in_process": []})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "in_process": []})
    single_s: dict[str, list[float]] = field(default_factory=dict)
    same: list[bool] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def compare(model: str | None, sizes: Sizes) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Figures as spreads, targets, and the model's name at the server. Both are loaded, and only one works at a time.

    Each repeat has prompts of its own, so that no prefix is cached, and begins with the other one. Requests are greedy
    and ignore the end of sequence.

    Raises:
        RuntimeError: a process failed, or a request to the server did.
    """
    settings = {"max_num_seqs": sizes.concurrency, "gpu_memory_utilization": _MEMORY_SHARE}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += [] if model is None else ["--model", model]
    found = _Found()
    with ChildServer(flags) as server:
        server.wait_until_idle()
        with InProcess(model, settings, sizes.lengths) as other:
            to = Target(f"{server.base_url}/v1")
            to = replace(to, model=asyncio.run(_first_model(to)))
            for repeat in range(-1, sizes.repeats):  # the first only warms up
                sides = [lambda seed: _by_server(to, server, sizes, seed), lambda seed: _by_other(other, sizes, seed)]
                seed = sizes.seed + 2 * repeat
                both = [sides[index](seed) for index in ((0, 1) if repeat % 2 else (1, 0))]
                if repeat >= 0:
                    _note(found, *(both if repeat % 2 else both[::-1]))
    results, targets = _report(found)
    return results, targets, to.model or ""


async def _first_model(to: Target) -> str:
    async with to.client() as client:
        return await client.first_model()


def _by_server(to: Target, server: ChildServer, sizes: Sizes, seed: int) -> tuple[Run, Run, float | None]:
    """The run with many at once, the one with one at a time, and the server's processor time of the first."""

    def run(load: Load) -> Run:
        sessions = random_sessions(sizes.lengths, load.seed)
        found = asyncio.run(send(to, BodyFields(ignore_eos=True), load, sessions))
        if failed := [record for record in found.records if not record.ok]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error} {failed[0].detail}".rstrip())
        return found

    before_s = server.cpu_s()
    many = run(Load(concurrency=sizes.concurrency, num_requests=sizes.num_requests, seed=seed))
    after_s = server.cpu_s()
    cpu_s = None if before_s is None or after_s is None else after_s - before_s
    return many, run(Load(concurrency=1, num_requests=sizes.num_single, seed=seed + 1)), cpu_s


def _by_other(other: InProcess, sizes: Sizes, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    many = other.measure("throughput", sizes.num_requests, seed)
    return many, other.measure("single", sizes.num_single, seed + 1)


def _note(found: _Found, server: tuple[Run, Run, float | None], other: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (many, single, cpu_s), (other_many, other_single) = server, other
    num_tokens = sum(record.num_tokens for record in many.records)
    found.rates["server"].append(num_tokens / many.duration_s)
    found.rates["in_process"].append(other_many["output_tokens_per_s"])
    if cpu_s is not None:
        found.cpu_s["server"].append(cpu_s / num_tokens)
        found.cpu_s["in_process"].append(other_many["cpu_s_per_token"])
    found.cpu_shares.append(many.monitor.cpu_share)
    texts = [record.text for record in sorted(many.records, key=lambda each: each.session)]
    found.same += [mine == theirs for mine, theirs in zip(texts, other_many["texts"], strict=True)]
    for name in ("ttft_s", "tpot_s"):
        mine = [getattr(record, name) for record in single.records]
        # One token has no time per token.
        pairs = [(a, b) for a, b in zip(mine, other_single[name], strict=True) if a is not None]
        for side, values in (("server", [a for a, _ in pairs]), ("in_process", [b for _, b in pairs])):
            found.single_s.setdefault(f"{side}.{name}", []).extend(values)
        found.single_s.setdefault(f"difference.{name}", []).extend(a - b for a, b in pairs)
    found.records += [*many.records, *single.records]


def _report(found: _Found) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    ratios = [a / b for a, b in zip(found.rates["server"], found.rates["in_process"], strict=True)]
    rates = {side: spread(values, higher_is_better=True) for side, values in found.rates.items()}
    comparison: dict[str, Any] = {
        "output_tokens_per_s": {**rates, "ratio": spread(ratios, higher_is_better=True)},
        # Which other work on the machine changes less than it changes the rates.
        "cpu_s_per_output_token": {side: spread(values) for side, values in found.cpu_s.items() if values},
        "one_at_a_time": {name: spread(values) for name, values in found.single_s.items() if values},
        "same_texts": {"num_compared": len(found.same), "num_same": sum(found.same)},
        "client_cpu_share_of_a_core": spread(found.cpu_shares),
    }
    targets = [target("throughput ratio", statistics.median(ratios), at_least=THROUGHPUT_RATIO)]
    for name in ("ttft_s", "tpot_s"):
        if values := found.single_s[f"difference.{name}"]:
            targets.append(target(f"difference of {name}", statistics.median(values), at_most=LATENCY_DIFFERENCE_S))
    checks = run_checks(make_checks(ignore_eos=True), found.records)
    return {"comparison": comparison, "checks": checks}, targets
