"""Requests that keep an engine busy in a known way, one step at a time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.request import SamplingParams

_ids = itertools.count()


@dataclass(frozen=True)
class Step:
    """One engine step: how long it took, the tokens it sampled, and whether every stream decoded one in it."""

    elapsed_s: float
    num_new_tokens: int
    is_decode: bool


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of token ids that share nothing, the same on every call."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def run_streams(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    num_output_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    step: Callable[[], Any] | None = None,
) -> Generator[Step, None, None]:
    """Send all prompts at once and step until each has its output; what the caller does between steps is not counted.

    The prefix cache is emptied first. The first step's time includes the queueing of the requests. With overlap, a
    step's tokens are of the one dispatched before it. `step` runs in place of `engine.step`.

    Raises:
        RuntimeError: a request ended early.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    request_ids = [f"bench-{next(_ids)}" for _ in prompts]
    num_unfinished = len(prompts)
    run_step = step or engine.step
    engine.scheduler.pages.forget()
    try:
        start = clock()
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            engine.add(request_id, list(prompt), params)
        while num_unfinished:
            outputs = [output for output, _ in run_step()]
            elapsed_s = clock() - start
            for output in outputs:
                _check(output, num_output_tokens)
                num_unfinished -= output.finished
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            yield Step(elapsed_s, len(outputs), len(outputs) == len(prompts) and min(lengths) > 1)
            start = clock()
    finally:
        for request_id in request_ids:
            engine.abort(request_id)


def _check(output: Any, num_output_tokens: int) -> None:
    choice = output.outputs[0]
    if output.finished and len(choice.token_ids) != num_output_tokens:
        raise RuntimeError(
            f"a request ended after {len(choice.token_ids)} of {num_output_tokens} tokens: "
            f"{choice.finish_reason}, {choice.stop_reason}"
        )
