"""The soak itself: load for a while, then what must be true of a server that nobody asks, then its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.serve.server import ChildServer
from jaxinfer.bench.soak.cases import (
    COMPLETIONS,
    NUM_REPEATED,
    NUM_TOOL_TOKENS,
    Case,
    Expect,
    World,
    make_case,
    repeated_case,
)
from jaxinfer.bench.soak.client import Clients, Outcome
from jaxinfer.bench.soak.forms import TOOLS
from jaxinfer.bench.soak.watch import (
    TOLERATED_FILES,
    Sample,
    Watch,
    not_flat,
    not_idle,
    read_metrics,
    sample_metrics,
    sample_process,
)

_MAX_TOLD, _MAX_ALIKE = 40, 4
_POLL_S, _PAUSE_S = 0.1, 0.5
_DRAINED_S = 3.0  # what the answers that run at the end are made to take
_DRAIN_LIMIT_S = 180.0


@dataclass(frozen=True)
class Plan:
    """What is sent: for `duration_s`, or just the cases `only`; `kinds` of it, all by default.

    idle_limit_s: how long the server may take to become idle.
    """

    duration_s: float | int
    concurrency: int
    seed: int = 0
    only: Sequence[int] | None = None
    kinds: tuple[str, ...] | None = None
    idle_limit_s: float | int = 60
    sample_interval_s: float | int = 1


@dataclass
class Findings:
    """Checks by name: how often each was made, and the faults, with the request that showed it."""

    num_checked: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, wrong: Sequence[str], case: Case | None = None) -> None:
        """Take note of a check, and of what was wrong."""
        self.num_checked[name] += 1
        for what in wrong:
            request = {} if case is None else {"request": case.described()}
            self.faults.append({"check": name, "what": what, **request})

    def report(self) -> list[dict[str, Any]]:
        """One entry a check, with the first of its faults, few of those that are alike."""
        found = []
        for name, num in self.num_checked.items():
            faults = [fault for fault in self.faults if fault["check"] == name]
            alike: Counter[str] = Counter()
            told = []
            for fault in faults:
                beginning = re.sub(r"\d+", "0", fault["what"])[:20]
                alike[beginning] += 1
                if alike[beginning] <= _MAX_ALIKE:
                    told.append(fault)
            found.append({"name": name, "num_checked": num, "num_failed": len(faults), "faults": told[:_MAX_TOLD]})
        return found


async def learn(clients: Clients, capacity: int | None, seed: int) -> World:
    """What the server tells of itself.

    Raises:
        RuntimeError: it is none of ours.
    """
    try:
        told = {path: json.loads((await clients.get(path))[1]) for path in ("/status", "/openapi.json")}
        settings, paths = told["/status"]["settings"], frozenset(told["/openapi.json"]["paths"])
        length = settings["max_model_len"]
        body = {"messages": [{"role": "user", "content": "x" * 30}], "tools": TOOLS}
        status, answer = await clients.post("/tokenize", body)
        fits = status == 200 and json.loads(answer)["count"] + NUM_TOOL_TOKENS <= length
        without = frozenset() if fits else frozenset({"tools"})
        return World(told["/status"]["model"], paths, length, settings["vocab_size"], capacity, seed, without)
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{clients.base_url} is no server of this package, or needs an --api-key") from error


class Soak:
    """One run. `child` is the server where it was started here; its process is then watched, and ended."""

    def __init__(self, clients: Clients, world: World, plan: Plan, child: ChildServer | None):
        self.findings = Findings()
        self.samples: list[Sample] = []
        self.kinds: Counter[str] = Counter()
        self.results: Counter[str] = Counter()
        self._clients, self._world, self._plan, self._child = clients, world, plan, child
        self._idle_files: int | None = None
        self._tokens: dict[str, list[list[int] | None]] = {}

    async def run(self) -> dict[str, Any]:
        """The results. Raises `RuntimeError` where the server has ended."""
        for number in range(NUM_REPEATED):
            await self._do(repeated_case(self._world, number))
        await self._idle()
        before = await self._sample()
        start_s = time.monotonic()
        async with Watch(self._sample, self._plan.sample_interval_s) as watch:
            await self._load(start_s + self._plan.duration_s)
            duration_s = time.monotonic() - start_s
        self.samples = watch.samples
        await self._after(before)
        told = json.loads((await self._clients.get("/status"))[1])["stats"]
        if self._child is not None:
            await self._places()
            await self._drain(self._child)
        return self._report(duration_s, before, told)

    async def _load(self, until_s: float) -> None:
        """Keep `concurrency` clients busy."""
        indices: Iterator[int] = itertools.count() if self._plan.only is None else iter(self._plan.only)

        async def work() -> None:
            for index in indices:
                if time.monotonic() >= until_s:
                    return
                await self._do(make_case(self._world, index, self._plan.kinds))

        workers = [asyncio.create_task(work()) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        answered = self.results["answered"]
        self.findings.check("some requests are answered", [] if answered else ["none was answered in full"])

    async def _do(self, case: Case) -> None:
        outcomes = await self._clients.send(case)
        if all(outcome.result == "HTTP 429" for outcome in outcomes):
            await asyncio.sleep(_PAUSE_S)  # as clients do: otherwise most of the load would be of refusals
        if any(outcome.result == "no answer" for outcome in outcomes):
            await asyncio.sleep(_PAUSE_S)
            self._check_alive(case)
        for outcome in outcomes:
            self.kinds[case.kind or "first answers"] += 1
            self._note(outcome)

    def _check_alive(self, case: Case) -> None:
        """Raise `RuntimeError` where the server has ended."""
        if self._child is not None and (code := self._child.wait(0)) is not None:
            last = self._child.log().strip().rpartition("\n")[2]
            raise RuntimeError(f"the server ended with {code} while request {case.index} ran: {last or 'no last word'}")

    def _note(self, outcome: Outcome) -> None:
        case = outcome.case
        self.results["wrong" if outcome.wrong else outcome.result] += 1
        if outcome.result not in ("left", "aborted") or outcome.wrong:
            name = "bad requests get their error" if case.expect.status != 200 else "answers are in order"
            self.findings.check(name, outcome.wrong, case)
        if case.expect.repeat is not None and outcome.answer is not None and not outcome.wrong:
            tokens = [choice.token_ids for _, choice in sorted(outcome.answer.choices.items())]
            first = self._tokens.setdefault(case.expect.repeat, tokens)
            wrong = [] if tokens == first else [f"tokens {tokens}, and {first} before"]
            self.findings.check("same request, same tokens", wrong, case)

    async def _sample(self) -> Sample | None:
        if self._child is not None and (sample := sample_process(self._child.pid)) is not None:
            return sample
        return sample_metrics((await self._clients.get("/metrics"))[1])

    async def _metrics(self) -> dict[str, dict[str, float]]:
        return read_metrics((await self._clients.get("/metrics"))[1])

    async def _idle(self) -> list[str]:
        """Wait until nothing runs; what still does after the limit."""
        deadline_s = time.monotonic() + self._plan.idle_limit_s
        while True:
            health = json.loads((await self._clients.get("/health"))[1])
            wrong = not_idle(await self._metrics(), health)
            if not wrong or time.monotonic() >= deadline_s:
                return wrong
            await asyncio.sleep(_POLL_S)

    async def _after(self, before: Sample | None) -> None:
        """What must be true when all clients have gone."""
        self.findings.check("an idle server holds nothing", await self._idle())
        self.findings.check("memory and threads are flat", not_flat(self.samples))
        deadline_s = time.monotonic() + self._plan.idle_limit_s
        while before is not None and (now := await self._sample()) is not None:
            self._idle_files = now.num_files
            num = now.num_files - before.num_files
            if num <= TOLERATED_FILES or time.monotonic() >= deadline_s:
                wrong = (
                    f"{now.num_files} are open, {before.num_files} were before; {TOLERATED_FILES} more are tolerated"
                )
                self.findings.check("files are closed", [] if num <= TOLERATED_FILES else [wrong])
                return
            await asyncio.sleep(_POLL_S)

    async def _places(self) -> None:
        """A request that needs every place is taken: none was lost."""
        if (capacity := self._world.capacity) is None:
            return
        body = {"prompt": [5], "max_tokens": 1, "n": min(capacity, 128)}
        case = Case(0, "every place", COMPLETIONS, body, Expect(num_choices=body["n"], may_be_full=False))
        for outcome in await self._clients.send(case):
            self.findings.check("every place is free again", outcome.wrong, case)

    async def _drain(self, child: ChildServer) -> None:
        """End the server while it is full: each request that it has taken is answered."""
        cases = list(self._last_cases(await self._tokens_of(_DRAINED_S)))
        running = [asyncio.create_task(self._clients.send(case)) for case in cases]
        wanted = sum(case.body["n"] for case in cases)
        deadline_s = time.monotonic() + self._plan.idle_limit_s
        while time.monotonic() < deadline_s:
            found = await self._metrics()
            names = ("num_requests_running", "num_requests_waiting")
            if sum(sum(found.get(f"jaxinfer:{name}", {}).values()) for name in names) >= wanted:
                break
            if all(task.done() for task in running):
                break
            await asyncio.sleep(_POLL_S / 10)
        under_way = sum(not task.done() for task in running)
        self.findings.check("requests run when it ends", [] if under_way else ["none did: they were over too soon"])
        child.terminate()
        for case, task in zip(cases, running, strict=True):
            for outcome in await task:
                self.findings.check("a drain loses nothing", outcome.wrong, case)
        code = await asyncio.to_thread(child.wait, _DRAIN_LIMIT_S)
        self.findings.check("it ends with exit code 0", [] if code == 0 else [f"exit code {code}"])
        traces = [line for line in child.log().splitlines() if "Traceback (most recent call last)" in line]
        lines = child.log().partition("Traceback (most recent call last)")[2].splitlines()[:40]
        wrong = [f"{len(traces)} tracebacks; the first: " + "\n".join(lines)] if traces else []
        self.findings.check("its log has no traceback", wrong)

    async def _tokens_of(self, seconds: float) -> int:
        """Tokens that one request gets in so many seconds, on the idle server."""
        body = {"prompt": [5], "max_tokens": min(32, self._world.max_model_len // 4), "ignore_eos": True}
        start_s = time.monotonic()
        await self._clients.send(Case(0, "", COMPLETIONS, body, Expect()))
        per_token_s = (time.monotonic() - start_s) / body["max_tokens"]
        return max(8, min(self._world.max_model_len // 2, round(seconds / per_token_s)))

    def _last_cases(self, num_tokens: int) -> Iterator[Case]:
        """Whole and streamed, one choice and two; together no more than the server holds."""
        places = min(self._world.capacity or 16, 2 * self._plan.concurrency)
        for number in range(places):
            n = 2 if number % 5 == 4 and places >= 2 else 1
            places -= n
            if places < 0:
                return
            body = {"prompt": [7 + number] * 5, "max_tokens": num_tokens, "ignore_eos": True, "n": n}
            body |= {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
            reasons = frozenset({"length"})
            expect = Expect(num_choices=n, max_tokens=num_tokens, exact=True, reasons=reasons, may_be_full=False)
            yield Case(number, "at the end", COMPLETIONS, body, expect)

    def _report(self, duration_s: float, before: Sample | None, stats: dict[str, Any]) -> dict[str, Any]:
        names = ("num_preemptions", "num_compiles", "num_computed_tokens", "num_cached_tokens", "pages_total")
        found: dict[str, Any] = {
            "duration_s": duration_s,
            "num_requests": self.kinds.total(),
            "kinds": dict(self.kinds.most_common()),
            "results": dict(self.results.most_common()),
            "engine": {name: stats.get(name) for name in names},
        }
        if before is not None and self.samples:
            last = self.samples[-1]
            found["process"] = {
                "rss_mib": [round(sample.rss_bytes / 2**20, 1) for sample in _quarters(self.samples)],
                "num_files": [before.num_files, max(sample.num_files for sample in self.samples), self._idle_files],
                "num_threads": [before.num_threads, last.num_threads],
            }
        return {**found, "checks": self.findings.report()}


def _quarters(samples: Sequence[Sample]) -> list[Sample]:
    """The first, those at each quarter, and the last."""
    return [samples[min(len(samples) - 1, len(samples) * part // 4)] for part in range(5)]
