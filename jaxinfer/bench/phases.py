"""Where a step's time goes, seen from the host.

    step   |schedule|build_inputs|dispatch|sampling_inputs|sampling_dispatch|      wait      |take|
    device                       |<- forward ------------------------------>|<- sampling  ->|

Dispatch is asynchronous, so host work between the two dispatches costs nothing as long as the forward still runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.bench.spread import spread

PHASES = ("schedule", "build_inputs", "dispatch", "sampling_inputs", "sampling_dispatch", "wait", "take")
_EXPOSED = ("schedule", "build_inputs", "dispatch", "take")


class StepTimer:
    """Times an engine's steps by wrapping its parts, on the objects themselves, while the `with` block lasts.

    `step` is `engine.step` timed. With `blocking` set it waits for each program before it goes on: `device_s` is then
    the time of both programs, and otherwise `phases_s` the time of each phase; the two together make the whole step.
    """

    def __init__(self, engine: Any, clock: Callable[[], float] = time.perf_counter):
        self.blocking = False
        self.phases_s: dict[str, float] = {}
        self.forward_s = self.device_s = self.step_s = 0.0
        self._engine = engine
        self._clock = clock
        self._marks: list[float] = []
        self._wrapped = [
            (engine.scheduler, "schedule", self._marking_end(engine.scheduler.schedule)),
            (engine.runner, "program", self._timing_call_of(engine.runner.program)),
            (engine.sampler, "compile", self._timing_call_of(engine.sampler.compile)),
            (engine, "_take", self._marking_first_start(engine._take)),
        ]

    def __enter__(self) -> StepTimer:
        for owner, name, function in self._wrapped:
            setattr(owner, name, function)
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, _ in self._wrapped:
            delattr(owner, name)

    def step(self) -> list[Any]:
        """One step of the engine; the measurements are kept until the next. A step that samples nothing has none."""
        self._marks = [self._clock()]
        result = self._engine.step()
        self._marks.append(self._clock())
        marks = self._marks
        self.phases_s = {}
        if len(marks) == len(PHASES) + 1:
            self.phases_s = {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
            self.forward_s = self.phases_s["dispatch"]
            self.device_s = self.forward_s + self.phases_s["sampling_dispatch"]
            self.step_s = marks[-1] - marks[0]
        return result

    def _mark(self) -> None:
        self._marks.append(self._clock())

    def _marking_end(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._mark()
            return result

        return wrapper

    def _marking_first_start(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(self._marks) == PHASES.index("take"):  # it may be called once a row
                self._mark()
            return function(*args, **kwargs)

        return wrapper

    def _timing_call_of(self, get_program: Callable) -> Callable:
        def get(key: Any) -> Callable:
            program = get_program(key)

            def call(*args: Any) -> Any:
                self._mark()
                result = program(*args)
                if self.blocking:
                    jax.block_until_ready(result)
                self._mark()
                return result

            return call

        return get


class HostShare:
    """Collects timed steps, plain and blocking in turn, and says what part of a step the device had nothing to do."""

    def __init__(self, timer: StepTimer):
        self._timer = timer
        self._plain: list[dict[str, float]] = []
        self._plain_s: list[float] = []
        self._forward_s: list[float] = []
        self._device_s: list[float] = []

    def add(self) -> None:
        """Take the timer's last step, and have the next one run the other way."""
        timer = self._timer
        if timer.phases_s and timer.blocking:
            self._forward_s.append(timer.forward_s)
            self._device_s.append(timer.device_s)
        elif timer.phases_s:
            self._plain.append(timer.phases_s)
            self._plain_s.append(timer.step_s)
        timer.blocking = not timer.blocking

    def report(self) -> dict[str, Any]:
        """Phases in seconds, and the host's share of a step by two routes that should agree.

        `host_share` adds up what ran with nothing dispatched; `host_share_by_difference` is the median plain step less
        the median time of both programs run to their end, over the step.
        """
        forward_s = statistics.median(self._forward_s)
        shares = []
        for phases, step_s in zip(self._plain, self._plain_s, strict=True):
            gap_s = max(0.0, phases["sampling_inputs"] - forward_s)
            shares.append((sum(phases[name] for name in _EXPOSED) + gap_s) / step_s)
        step_s, device_s = spread(self._plain_s), spread(self._device_s)
        return {
            "step_s": step_s,
            "device_s": device_s,
            "forward_s": spread(self._forward_s),
            "phases_s": {name: spread([phases[name] for phases in self._plain]) for name in PHASES},
            "host_share": spread(shares),
            "host_share_by_difference": 1 - device_s["median"] / step_s["median"],
        }
