"""What the prefix cache saves: the same workloads with it and without, in turn on one engine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxinfer.bench.spread import spread
from jaxinfer.bench.workload import random_prompts
from jaxinfer.request import SamplingParams

MESSAGE_TOKENS = 48
QUESTION_TOKENS = 16
REPLY_TOKENS = 16
ANSWER_TOKENS = 4

_ids = itertools.count()

Serve = Callable[[Sequence[list[int]], int], list[list[int]]]
"""Sends prompts together, and returns so many output tokens of each."""


@dataclass(frozen=True)
class Sizes:
    """How much is sent. A chat has `turns`; `requests` share a system prompt, or examples, of `prefix_tokens`."""

    turns: int
    requests: int
    prefix_tokens: int

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its output."""
        chat = self.turns * (MESSAGE_TOKENS + REPLY_TOKENS)
        return max(chat, self.prefix_tokens + QUESTION_TOKENS + REPLY_TOKENS)


def chat(serve: Serve, vocab_size: int, sizes: Sizes) -> list[list[int]]:
    """One conversation; each turn sends all of it again."""
    conversation: list[int] = []
    replies = []
    for message in random_prompts(sizes.turns, MESSAGE_TOKENS, vocab_size, seed=1):
        conversation += message
        (reply,) = serve([conversation], REPLY_TOKENS)
        conversation += reply
        replies.append(reply)
    return replies


def shared_prompt(serve: Serve, vocab_size: int, sizes: Sizes) -> list[list[int]]:
    """Requests that arrive together, each a question after one system prompt."""
    return serve(_questions(vocab_size, sizes, seed=2), REPLY_TOKENS)


def few_shot(serve: Serve, vocab_size: int, sizes: Sizes) -> list[list[int]]:
    """Short questions about one table of examples, one after another, with short answers."""
    prompts = _questions(vocab_size, sizes, seed=3)
    return [answer for prompt in prompts for answer in serve([prompt], ANSWER_TOKENS)]


def _questions(vocab_size: int, sizes: Sizes, seed: int) -> list[list[int]]:
    """Prompts that share the prefix and no token more."""
    (prefix,) = random_prompts(1, sizes.prefix_tokens, vocab_size, seed)
    tails = random_prompts(sizes.requests, QUESTION_TOKENS - 1, vocab_size, seed + 10)
    return [[*prefix, index % vocab_size, *tail] for index, tail in enumerate(tails)]


WORKLOADS = {"chat": chat, "shared_prompt": shared_prompt, "few_shot": few_shot}


@dataclass(frozen=True)
class _Run:
    elapsed_s: float
    ttft_s: float
    num_computed_tokens: int
    hit_rate: float
    outputs: list[list[int]]


def measure_prefix(
    engine: Any, *, sizes: Sizes, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Run each workload with the prefix cache, empty at first, and without, `repeats` times over.

    Ratios are without over with, `ttft_ratio` of the mean time to first token. `computed_prefix_ratio` of the shared
    prompt is how often its prefix was computed in all.

    Raises:
        RuntimeError: a request ended early.
    """
    rows = []
    for name, workload in WORKLOADS.items():
        job = partial(workload, vocab_size=engine.config.model.vocab_size, sizes=sizes)
        pairs = [(_run(engine, job, True, clock), _run(engine, job, False, clock)) for _ in range(repeats)]
        cached, plain = pairs[0]
        row: dict[str, Any] = {
            "workload": name,
            "time_ratio": spread([off.elapsed_s / on.elapsed_s for on, off in pairs], higher_is_better=True),
            "ttft_ratio": spread([off.ttft_s / on.ttft_s for on, off in pairs], higher_is_better=True),
            "cached_s": spread([on.elapsed_s for on, _ in pairs]),
            "plain_s": spread([off.elapsed_s for _, off in pairs]),
            "cached_computed_tokens": cached.num_computed_tokens,
            "plain_computed_tokens": plain.num_computed_tokens,
            "computed_tokens_ratio": plain.num_computed_tokens / cached.num_computed_tokens,
            "hit_rate": cached.hit_rate,
            "same_tokens": all(on.outputs == off.outputs for on, off in pairs),
        }
        if name == "shared_prompt":
            tails = sizes.requests * (QUESTION_TOKENS + REPLY_TOKENS - 1)  # the last token is never computed
            row["computed_prefix_ratio"] = (cached.num_computed_tokens - tails) / sizes.prefix_tokens
        rows.append(row)
    return {"workloads": rows}


def _run(engine: Any, job: Callable[[Serve], list[list[int]]], share: bool, clock: Callable[[], float]) -> _Run:
    """One workload on an empty prefix cache, or without one."""
    pages = engine.scheduler.pages
    setting = pages.share
    pages.forget()
    pages.share = share
    try:
        before = engine.stats()["num_computed_tokens"], pages.num_cached_tokens, pages.num_looked_up_tokens
        first_s: list[float] = []
        start = clock()
        outputs = job(partial(_serve, engine, first_s))
        elapsed_s = clock() - start
        after = engine.stats()["num_computed_tokens"], pages.num_cached_tokens, pages.num_looked_up_tokens
    finally:
        pages.share = setting
    computed, found, looked_up = (new - old for new, old in zip(after, before, strict=True))
    return _Run(elapsed_s, statistics.fmean(first_s), computed, found / max(1, looked_up), outputs)


def _serve(engine: Any, first_s: list[float], prompts: Sequence[list[int]], num_output_tokens: int) -> list[list[int]]:
    """See `Serve`; adds the times to first token to `first_s`."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    request_ids = [f"prefix-{next(_ids)}" for _ in prompts]
    finished: dict[str, list[int]] = {}
    try:
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            engine.add(request_id, prompt, params)
        while engine.has_work:
            for output, _ in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0].token_ids
                    first_s.append(output.metrics["ttft_s"])
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
    if any(len(finished.get(each, ())) != num_output_tokens for each in request_ids):
        raise RuntimeError(f"a request ended before its {num_output_tokens} tokens")
    return [finished[each] for each in request_ids]
