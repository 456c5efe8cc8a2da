"""One vector of a text from the states of its tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.request import SamplingParams
from jaxinfer.serve import crowd
from jaxinfer.serve.embedding_schemas import Pooling
from jaxinfer.serve.server import Call, Prompt, Server

READING = SamplingParams(max_tokens=0, return_hidden_states=True)


async def vectors(server: Server, call: Call, texts: Sequence[list[int]], pooling: Pooling) -> list[Any]:
    """The unit vector `[D]` of each text, float64.

    Raises:
        ApiError, ValueError: those of `crowd.outputs`.
    """
    found: list[Any] = [None] * len(texts)
    async for index, output in crowd.outputs(server, call, [Prompt(ids, READING) for ids in texts]):
        found[index] = await asyncio.to_thread(pooled, output.prompt_hidden_states, pooling)
    return found


def pooled(states: Any, pooling: Pooling) -> Any:
    """`[D]` of length 1, of `[T, D]`: the mean of all tokens, or the state of the last."""
    states = np.asarray(states)
    return unit(states.mean(axis=0, dtype=np.float64) if pooling == "mean" else states[-1].astype(np.float64))


def shortened(vector: Any, dimensions: int | None) -> Any:
    """The first `dimensions` components of a vector, at length 1 again."""
    return vector if dimensions is None else unit(vector[:dimensions])


def unit(vector: Any) -> Any:
    """The vector at length 1; one of zeros as it is."""
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector


def encoded(vector: Any, encoding: str) -> str | list[float]:
    """A vector as a client asked for it: numbers, or float32 of little-endian byte order in base64."""
    rounded = vector.astype("<f4")
    return base64.b64encode(rounded.tobytes()).decode() if encoding == "base64" else rounded.tolist()
