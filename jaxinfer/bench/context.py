"""Decode time against context length, held against the bytes of cache that a longer context adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxinfer.bench.bandwidth import cache_bytes
from jaxinfer.bench.spread import slope, spread
from jaxinfer.bench.workload import random_prompts
from jaxinfer.engine.inputs import Row


def measure_context(
    engine: Any,
    probe: Callable[[], float],
    *,
    contexts: Sequence[int],
    steps: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time `steps` decode steps at each context length in turn, `repeats` times over.

    The cache is filled once, by a chunked prefill of the longest context. A shorter context is the same pages with a
    smaller length, so that all of them can take turns. Timed is the model's forward: sampling costs the same at every
    length.
    """
    longest = max(contexts)
    manager = engine.scheduler.pages
    allocator, needed = manager.allocator, -(-longest // manager.page_size)
    if needed > allocator.num_free:
        raise ValueError(f"contexts: {longest} tokens do not fit the cache of {allocator.num_pages - 1} pages")
    pages = [allocator.allocate() for _ in range(needed)]
    try:
        tokens = random_prompts(1, longest, engine.config.model.vocab_size)[0]
        prefill_s = _fill(engine, tokens, pages, clock)
        return {"prefill_tokens_per_s": longest / prefill_s} | _decode(
            engine, probe, tokens, pages, contexts, steps, repeats, clock
        )
    finally:
        allocator.free(pages)


def _fill(engine: Any, tokens: list[int], pages: list[int], clock: Callable[[], float]) -> float:
    chunk = engine.config.scheduler.max_num_batched_tokens
    start = clock()
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        _run(engine, Row(part, first + len(part), pages))
    return clock() - start


def _run(engine: Any, row: Row) -> None:
    jax.block_until_ready(engine.runner.run([row])[1])


def _decode(
    engine: Any,
    probe: Callable[[], float],
    tokens: list[int],
    pages: list[int],
    contexts: Sequence[int],
    steps: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    config = engine.config
    sizes = [cache_bytes(config.model, context, config.kv_dtype) for context in contexts]
    times: list[list[float]] = [[] for _ in contexts]
    bandwidths, slopes, ratios = [probe()], [], []
    for _ in range(repeats):
        means = []
        for context, samples in zip(contexts, times, strict=True):
            row = Row([tokens[context - 1]], context, pages[: -(-context // engine.scheduler.pages.page_size)])
            _run(engine, row)  # the other contexts' keys leave the processor's caches
            for _ in range(steps):
                start = clock()
                _run(engine, row)
                samples.append(clock() - start)
            means.append(sum(samples[-steps:]) / steps)
        bandwidths.append(probe())
        slopes.append(slope(sizes, means))
        ratios.append(slopes[-1] * (bandwidths[-2] + bandwidths[-1]) / 2)
    rows = [
        {"context_len": context, "cache_bytes": size, "decode_forward_s": spread(samples)}
        for context, size, samples in zip(contexts, sizes, times, strict=True)
    ]
    return {
        "contexts": rows,
        "read_bandwidth_bytes_per_s": spread(bandwidths, higher_is_better=True),
        "slope_s_per_cache_gb": spread([value * 1e9 for value in slopes]),
        "slope_over_floor": spread(ratios),
    }
