"""One run against a server, or as many as the search for a rate takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxinfer.bench.serve.arrivals import Load
from jaxinfer.bench.serve.checks import make_checks, run_checks
from jaxinfer.bench.serve.client import Client
from jaxinfer.bench.serve.prompts import Session
from jaxinfer.bench.serve.report import summarize
from jaxinfer.bench.serve.run import BodyFields, Run, run_load
from jaxinfer.bench.serve.search import find_rate
from jaxinfer.progress import can_show, progress_bar

_OVERLOAD = (429, 503)  # what a server may well answer to rates that a search tries


@dataclass(frozen=True)
class Target:
    """A server's endpoint; `model` None is the first that it lists."""

    base_url: str
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = None
    timeout_s: float | int = 600.0

    def client(self) -> Client:
        return Client(self.base_url, self.endpoint, api_key=self.api_key, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Plan:
    """What is sent and measured. `sessions` makes the prompts of a seed.

    With a `share` the highest rate is searched at which that share of the requests meets the `slo`, in `max_runs` runs.
    """

    load: Load
    sessions: Callable[[int], Iterator[Session]]
    slo: dict[str, float]
    num_warmup: int = 1
    share: float | int | None = None
    max_runs: int = 8


def measure(
    target: Target, fields: BodyFields, plan: Plan, accepted_statuses: Collection[int] = ()
) -> tuple[Run, dict[str, Any], str]:
    """The run, its results, and the model's name; of a search, the run at the rate it found, else the last one.

    Raises:
        RuntimeError: the model's name is not given, and the server does not tell it.
        ValueError: prompts that the endpoint does not take.
    """
    model = target.model or asyncio.run(_first_model(target))
    target = replace(target, model=model)
    if plan.num_warmup:
        warmup = Load(concurrency=plan.num_warmup, num_requests=plan.num_warmup)
        asyncio.run(send(target, fields, warmup, plan.sessions(plan.load.seed - 1)))
    if plan.share is not None:
        return (*_search(target, fields, plan, plan.share, accepted_statuses), model)
    sent = asyncio.run(send(target, fields, plan.load, plan.sessions(plan.load.seed)))
    return sent, summarize(sent, make_checks(fields.ignore_eos, accepted_statuses), plan.slo), model


async def send(target: Target, fields: BodyFields, load: Load, sessions: Iterator[Session]) -> Run:
    """One run against a target whose model is known, with a bar for who watches."""
    body = partial(fields.body, target.endpoint, target.model or "")
    with progress_bar(total=load.num_requests, unit="request", shown=can_show()) as bar:
        async with target.client() as client:
            return await run_load(client, sessions, load, body, bar.update)


async def _first_model(target: Target) -> str:
    async with target.client() as client:
        return await client.first_model()


def _search(
    target: Target, fields: BodyFields, plan: Plan, share: float | int, accepted_statuses: Collection[int]
) -> tuple[Run, dict[str, Any]]:
    """Each try has prompts of its own, lest the server know them from the last one. Checks are those of all tries."""
    checks = make_checks(fields.ignore_eos, {*accepted_statuses, *_OVERLOAD})
    runs: dict[float, tuple[Run, dict[str, Any]]] = {}

    def passes(rate: float) -> bool:
        seed = plan.load.seed + len(runs)
        sent = asyncio.run(send(target, fields, replace(plan.load, rate=rate, seed=seed), plan.sessions(seed)))
        results = summarize(sent, checks, plan.slo)
        runs[rate] = sent, results
        return results["goodput"]["share"] >= share

    found = find_rate(passes, plan.load.rate or 1.0, max_runs=plan.max_runs)
    sent, results = runs[found.tries[-1][0] if found.rate is None else found.rate]
    tries = [
        {"rate": rate, "passed": passed, "share": runs[rate][1]["goodput"]["share"]} for rate, passed in found.tries
    ]
    search = {"rate": found.rate, "failed_rate": found.failed_rate, "wanted_share": share, "tries": tries}
    everything = [record for each, _ in runs.values() for record in each.records]
    return sent, {"search": search, **results, "checks": run_checks(checks, everything)}
