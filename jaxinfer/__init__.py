"""An inference runtime for language models in JAX: `generate`, `LLM`, `SamplingParams` and the output types.

Names load on first use, so that importing the package loads neither jax nor flax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxinfer.engine.errors import EngineDeadError, EngineError, RequestError
    from jaxinfer.llm import LLM
    from jaxinfer.quick import generate
    from jaxinfer.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from jaxinfer.sampling.processors import LogitsProcessor
    from jaxinfer.scoring import ContinuationScore
    from jaxinfer.structured.params import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ContinuationScore",
    "EngineDeadError",
    "EngineError",
    "Logprob",
    "LogitsProcessor",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "generate",
]
_HOMES = {
    "AsyncLLM": "jaxinfer.async_llm",
    "BeamSearchOutput": "jaxinfer.beam_search",
    "BeamSearchParams": "jaxinfer.beam_search",
    "BeamSearchSequence": "jaxinfer.beam_search",
    "ContinuationScore": "jaxinfer.scoring",
    "EngineDeadError": "jaxinfer.engine.errors",
    "EngineError": "jaxinfer.engine.errors",
    "RequestError": "jaxinfer.engine.errors",
    "LLM": "jaxinfer.llm",
    "LogitsProcessor": "jaxinfer.sampling.processors",
    "StructuredOutputsParams": "jaxinfer.structured.params",
    "generate": "jaxinfer.quick",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "jaxinfer.request")), name)


def __dir__() -> list[str]:
    return [*__all__]
