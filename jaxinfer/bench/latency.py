"""One stream: time to first token, time per token, and how far a decode step is from reading the weights once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.spread import spread
from jaxinfer.bench.workload import random_prompts, run_streams

STEPS_PER_BLOCK = 8
"""Decode steps between two probes of the bandwidth, which drifts on a shared machine."""


def measure_latency(
    engine: Any,
    probe: Callable[[], float],
    weight_bytes: int,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Decode one request `repeats` times. `probe` returns bytes/s; it runs between blocks of decode steps.

    Each block's mean step is divided by the time of reading `weight_bytes` at the mean of the probes around it.
    """
    prompt = random_prompts(1, num_prompt_tokens, engine.config.model.vocab_size)
    for _ in run_streams(engine, prompt, min(STEPS_PER_BLOCK, num_output_tokens), clock):
        pass  # warm-up: first touches of memory, caches of the host
    first_s, per_token_s, steps_s, bandwidths, ratios = [], [], [], [], []
    for _ in range(repeats):
        before = probe()
        bandwidths.append(before)
        prefill_s, decode_s, block = 0.0, [], []
        for step in run_streams(engine, prompt, num_output_tokens, clock):
            if not step.is_decode:
                prefill_s += step.elapsed_s
                continue
            decode_s.append(step.elapsed_s)
            block.append(step.elapsed_s)
            if len(block) == STEPS_PER_BLOCK or len(decode_s) == num_output_tokens - 1:
                after = probe()
                bandwidths.append(after)
                ratios.append(statistics.fmean(block) * (before + after) / 2 / weight_bytes)
                before, block = after, []
        first_s.append(prefill_s)
        per_token_s.append(statistics.fmean(decode_s))
        steps_s += decode_s
    floors_s = [weight_bytes / value for value in bandwidths]
    return {
        "ttft_s": spread(first_s),
        "prefill_tokens_per_s": spread([num_prompt_tokens / value for value in first_s], higher_is_better=True),
        "tpot_s": spread(per_token_s),
        "decode_step_s": spread(steps_s),
        "read_bandwidth_bytes_per_s": spread(bandwidths, higher_is_better=True),
        "weight_bytes": weight_bytes,
        "weight_read_floor_s": spread(floors_s),
        "decode_step_over_floor": spread(ratios),
    }
