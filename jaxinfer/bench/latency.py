"""One stream: time to first token, time per token, and how far a decode step is from reading the weights once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.spread import spread
from jaxinfer.bench.workload import random_prompts, run_streams

WARM_UP_TOKENS = 8


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
    """Decode one request `repeats` times. `probe` returns bytes/s; it runs between, while no step is in flight.

    Each repeat's mean step is divided by the time of reading `weight_bytes` at the mean of the probes around it.
    """
    prompt = random_prompts(1, num_prompt_tokens, engine.config.model.vocab_size)
    for _ in run_streams(engine, prompt, min(WARM_UP_TOKENS, num_output_tokens), clock):
        pass  # warm-up: first touches of memory, caches of the host
    first_s, per_token_s, steps_s, bandwidths, ratios = [], [], [], [probe()], []
    for _ in range(repeats):
        steps = list(run_streams(engine, prompt, num_output_tokens, clock))
        bandwidths.append(probe())
        decode_s = [step.elapsed_s for step in steps if step.is_decode]
        first_s.append(sum(step.elapsed_s for step in steps if not step.is_decode))
        per_token_s.append(statistics.fmean(decode_s))
        ratios.append(per_token_s[-1] * statistics.fmean(bandwidths[-2:]) / weight_bytes)
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
