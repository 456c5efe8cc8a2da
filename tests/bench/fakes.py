"""An engine whose every duration is known."""

from __future__ import annotations

from collections.abc import Callable
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


class FakeEngine:
    """Prefills each request whole, `prefill_s` each, then decodes all in steps whose phases take `phases_s`.

    `forward_s` and `sampling_s` are what a program takes beyond its dispatch when its result is waited for.
    """

    def __init__(self, clock: Clock, phases_s: dict[str, float], prefill_s: float = 2.0):
        self.config = SimpleNamespace(model=SimpleNamespace(vocab_size=10))
        self.clock, self.phases_s, self.prefill_s = clock, phases_s, prefill_s
        self.finish_early_with: str | None = None
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.scheduler = SimpleNamespace(schedule=lambda: clock.tick(phases_s["schedule"]))
        self.runner = SimpleNamespace(program=lambda bucket: self._dispatching("dispatch"))
        self.sampler = SimpleNamespace(compile=lambda num_rows: self._dispatching("sampling_dispatch"))
        self._unfilled: list[str] = []

    def _dispatching(self, phase: str) -> Callable[[], None]:
        return lambda: self.clock.tick(self.phases_s[phase])

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
        self.scheduler.schedule()
        self.clock.tick(self.phases_s["build_inputs"])
        self.runner.program(None)()
        self.clock.tick(self.phases_s["sampling_inputs"])
        self.sampler.compile(len(self.requests))()
        self.clock.tick(self.phases_s["wait"])
        decoding = [key for key, output in self.requests.items() if not output.finished]
        for _ in decoding:
            self._take(len(decoding))
        return self._sampled(decoding)

    def _take(self, num_rows: int) -> None:
        self.clock.tick(self.phases_s["take"] / num_rows)

    def _sampled(self, request_ids: list[str]) -> list[tuple[Any, list[str]]]:
        outputs = [self.requests[request_id] for request_id in request_ids]
        for output in outputs:
            output.outputs[0].token_ids.append(1)
            output.outputs[0].finish_reason = self.finish_early_with
            output.finished = len(output.outputs[0].token_ids) == output.wanted or bool(self.finish_early_with)
        return [(output, [""]) for output in outputs]
