"""Where a step's time goes, seen from the host, and how much of it leaves the device without work.

    step   |schedule|build_inputs|dispatch|sampling_inputs|sampling_dispatch|      wait      |take|
    device                        <- forward ------------------------------>|<- sampling  ->|

Without overlap a step waits for its own tokens, so the device rests from there to the next dispatch. With overlap it
waits for those of the step before; the device goes on with this step meanwhile, and rests only where it ends before
the next is dispatched. Dispatch is asynchronous, but on CPUs a few dozen programs at most are in flight: with overlap
the host then waits inside `dispatch`, and finds the tokens of the step before ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

PHASES = ("schedule", "build_inputs", "dispatch", "sampling_inputs", "sampling_dispatch", "wait", "take")


@dataclass(frozen=True)
class StepRecord:
    """One step that dispatched both programs and read tokens.

    `phases_s` add up to `step_s`. `idle_s` is how long the device had rested, as far as the host can know, before each
    of the two programs came. `device_s` is what each ran for, known only of a blocking step.
    """

    step_s: float
    phases_s: dict[str, float]
    idle_s: float
    device_s: tuple[float, float]


class StepTimer:
    """Times an engine's steps by wrapping its parts, on the objects themselves, while the `with` block lasts.

    `step` is `engine.step` timed; `record` is what it measured, None of a step that lacks a phase. With `blocking` set,
    each program starts on a device that rests, and is waited for.

    Whether the device works is seen at the ends of phases only. What became ready within one counts as ready at its
    start, unless the phase is a wait or a dispatch, which may end because it is: so `idle_s` errs towards more.
    """

    def __init__(self, engine: Any, clock: Callable[[], float] = time.perf_counter):
        self.blocking = False
        self.record: StepRecord | None = None
        self._engine = engine
        self._clock = clock
        self._marks: list[float] = []
        self._last_mark = 0.0
        self._running: Any = None  # an output of the program dispatched last
        self._rests_since: float | None = None
        self._idle_s = 0.0
        self._started_s = 0.0
        self._device_s: list[float] = []
        self._wrapped = [
            (engine.scheduler, "schedule", self._marking_end(engine.scheduler.schedule)),
            (engine.runner, "program", self._timing_call_of(engine.runner.program)),
            (engine.sampler, "compile", self._timing_call_of(engine.sampler.compile)),
            (engine.reader, "_take", self._marking_first_start(engine.reader._take)),
        ]

    def __enter__(self) -> StepTimer:
        for owner, name, function in self._wrapped:
            setattr(owner, name, function)
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, _ in self._wrapped:
            delattr(owner, name)
        self._running = None

    def step(self) -> list[Any]:
        """One step of the engine."""
        self._marks, self._device_s, self._idle_s = [], [], 0.0
        self._mark()
        result = self._engine.step()
        self._mark()
        marks, self.record = self._marks, None
        if len(marks) == len(PHASES) + 1:
            phases_s = {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
            forward_s, sampling_s = self._device_s
            self.record = StepRecord(marks[-1] - marks[0], phases_s, self._idle_s, (forward_s, sampling_s))
        return result

    def _mark(self, ends_when_ready: bool = False) -> None:
        """A phase ends. `ends_when_ready`: what it waited for may be the program that runs."""
        now = self._clock()
        if self._rests_since is None and (self._running is None or self._running.is_ready()):
            self._rests_since = now if ends_when_ready or self._running is None else self._last_mark
        self._marks.append(now)
        self._last_mark = now

    def _feed(self) -> None:
        """The device has got work."""
        now = self._clock()
        if self._rests_since is not None:
            self._idle_s += now - self._rests_since
        self._rests_since, self._started_s = None, now

    def _marking_end(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._mark()
            return result

        return wrapper

    def _marking_first_start(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(self._marks) == PHASES.index("take"):  # it may be called once a row
                self._mark(ends_when_ready=True)
            return function(*args, **kwargs)

        return wrapper

    def _timing_call_of(self, get_program: Callable) -> Callable:
        def get(key: Any) -> Callable:
            program = get_program(key)

            def call(*args: Any) -> Any:
                if self.blocking:
                    jax.block_until_ready(self._running)
                self._mark(ends_when_ready=self.blocking)
                result = self._feeding(program)(*args)
                if self.blocking:
                    jax.block_until_ready(result)
                self._running = jax.tree.leaves(result[1])[0]  # both programs donate parts of the others
                self._mark(ends_when_ready=True)
                self._device_s.append(self._last_mark - self._started_s)
                return result

            return call

        return get

    def _feeding(self, program: Any) -> Callable:
        """The program, which says when it has given the device work: a layerwise one with the first of its parts."""
        first = getattr(program, "begin", program)

        def feed(*args: Any) -> Any:
            result = first(*args)
            self._feed()
            return result

        return feed if first is program else replace(program, begin=feed)
