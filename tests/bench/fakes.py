"""An engine and a device whose every duration is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def tick(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeArray:
    """What a program returns, ready at a time."""

    clock: Clock
    ready_at_s: float

    def is_ready(self) -> bool:
        return self.clock.now_s >= self.ready_at_s

    def block_until_ready(self) -> FakeArray:
        self.clock.now_s = max(self.clock.now_s, self.ready_at_s)
        return self


@dataclass(frozen=True)
class FakeConfig:
    overlap: bool
    model: Any


class FakeEngine:
    """Prefills each request whole, `prefill_s` each, then decodes all in steps.

    `host_s` is what the host takes for each phase of a step but the wait, `device_s` what the forward and the sampling
    take on the device, which begins with one when its dispatch is over and it is done with the one before.
    """

    def __init__(
        self,
        clock: Clock,
        host_s: dict[str, float],
        device_s: tuple[float, float] = (3.0, 0.25),
        overlap: bool = False,
        prefill_s: float = 2.0,
    ):
        self.config = FakeConfig(overlap, SimpleNamespace(vocab_size=10))
        self.clock, self.host_s, self.device_s, self.prefill_s = clock, host_s, device_s, prefill_s
        self.finish_early_with: str | None = None
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.num_forgets = 0
        self.scheduler = SimpleNamespace(schedule=lambda: clock.tick(host_s["schedule"]), pages=self)
        self.runner = SimpleNamespace(program=lambda bucket: self._program("dispatch", device_s[0]))
        self.sampler = SimpleNamespace(compile=lambda num_rows: self._program("sampling_dispatch", device_s[1]))
        self.reader = SimpleNamespace(_take=self._take)
        self._unfilled: list[str] = []
        self._in_flight: tuple[list[str], FakeArray] | None = None
        self._device_free_at_s = 0.0

    def forget(self) -> None:
        self.num_forgets += 1

    def _program(self, phase: str, duration_s: float) -> Callable[[], tuple[None, FakeArray]]:
        def run() -> tuple[None, FakeArray]:
            self.clock.tick(self.host_s[phase])
            self._device_free_at_s = max(self.clock.now_s, self._device_free_at_s) + duration_s
            return None, FakeArray(self.clock, self._device_free_at_s)

        return run

    def add(self, request_id: str, prompt_ids: list[int], params: Any) -> None:
        choice = SimpleNamespace(token_ids=[], finish_reason=None, stop_reason=None)
        self.requests[request_id] = SimpleNamespace(outputs=[choice], finished=False, wanted=params.max_tokens)
        self._unfilled.append(request_id)

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.aborted.append(request_id)

    def step(self) -> list[tuple[Any, list[str]]]:
        if self._unfilled:
            self.clock.tick(self.prefill_s)
            return self._sampled([self._unfilled.pop(0)])
        before, self._in_flight = self._in_flight, None
        num_coming = before is not None and any(key in self.requests for key in before[0])
        wanted = [
            key
            for key, output in self.requests.items()
            if len(output.outputs[0].token_ids) + num_coming < output.wanted and not output.finished
        ]
        self.scheduler.schedule()
        if wanted:
            self.clock.tick(self.host_s["build_inputs"])
            self.runner.program(None)()
            self.clock.tick(self.host_s["sampling_inputs"])
            self._in_flight = wanted, self.sampler.compile(len(wanted))()[1]
        reads = [] if before is None else [before]
        if self._in_flight is not None and not self.config.overlap:
            reads.append(self._in_flight)
            self._in_flight = None
        results = {}
        for request_ids, tokens in reads:
            results.update(self._read(request_ids, tokens))
        return list(results.values())

    def _read(self, request_ids: list[str], tokens: FakeArray) -> dict[str, tuple[Any, list[str]]]:
        tokens.block_until_ready()
        alive = [key for key in request_ids if key in self.requests]
        for _ in alive:
            self.reader._take(len(alive))
        return dict(zip(alive, self._sampled(alive), strict=True))

    def _take(self, num_rows: int) -> None:
        self.clock.tick(self.host_s["take"] / num_rows)

    def _sampled(self, request_ids: list[str]) -> list[tuple[Any, list[str]]]:
        outputs = [self.requests[request_id] for request_id in request_ids]
        for output in outputs:
            output.outputs[0].token_ids.append(1)
            output.outputs[0].finish_reason = self.finish_early_with
            output.finished = len(output.outputs[0].token_ids) == output.wanted or bool(self.finish_early_with)
        return [(output, [""]) for output in outputs]
