"""`GET /status`: what the page shows, as JSON: the model, its settings, the engine's counts and totals."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

import jaxinfer
from jaxinfer.config import EngineConfig

router = APIRouter()

_STARTED_S = time.monotonic()


@router.get("/status", include_in_schema=False)
async def status(request: Request) -> dict[str, Any]:
    server = request.app.state.server
    return {
        "model": server.model_name,
        "state": server.state,
        "version": jaxinfer.__version__,
        "uptime_s": time.monotonic() - _STARTED_S,
        "settings": settings_of(server.llm.config),
        "stats": server.llm.stats(),
        "totals": totals_of(server.llm),
    }


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """What the engine runs with."""
    model, cache, limits = config.model, config.cache, config.scheduler
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "dtype": config.dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": cache.page_size,
        "enable_prefix_caching": cache.enable_prefix_caching,
    }


def totals_of(llm: Any) -> dict[str, float | int]:
    """What only grows: the differences of two answers are rates."""
    found = llm.metrics.snapshot()
    first, gaps = found.histograms["first_token_s"], found.histograms["gap_s"]
    return {
        "prompt_tokens": found.prompt_tokens,
        "cached_prompt_tokens": found.cached_prompt_tokens,
        "generation_tokens": found.generation_tokens,
        "requests": found.histograms["request_s"].num,
        "first_tokens": first.num,
        "ttft_s": first.sum,
        "gaps": gaps.num,
        "gap_s": gaps.sum,
    }
