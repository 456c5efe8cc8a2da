"""The options of every row of a step, as arrays: any mixture of requests runs in one compiled program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxinfer.sampling.processors import LogitsProcessor, default_params

MAX_LOGIT_BIAS = 1024  # entries of logit_bias that one request may have
NO_TOKEN = np.iinfo(np.int32).max  # pads bias_ids: past any vocabulary, where a negative id would wrap round


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """Sampling options for B rows over a vocabulary of V tokens; W = ceil(V / 32), E = bias entries per row.

    Leaves are NumPy arrays on the host (fill them in place), JAX arrays in a step.
    """

    temperature: Any  # float32 [B]; 0 takes the most likely token
    top_k: Any  # int32 [B]; 0 keeps all
    top_p: Any  # float32 [B] in (0, 1]; 1 keeps all
    min_p: Any  # float32 [B] in [0, 1]; 0 keeps all
    typical_p: Any  # float32 [B] in (0, 1]; 1 keeps all
    repetition_penalty: Any  # float32 [B] > 0; 1 changes nothing
    presence_penalty: Any  # float32 [B]; 0 changes nothing
    frequency_penalty: Any  # float32 [B]; 0 changes nothing
    seed: Any  # uint32 [B, 2]: the request's key
    choice: Any  # int32 [B]: index among the request's n choices
    position: Any  # int32 [B]: absolute index of the token being sampled
    lane: Any  # int32 [B]: row of `SamplingState`; padding rows have the last one
    use_penalties: Any  # bool [B]
    use_mask: Any  # bool [B]
    token_mask: Any  # uint32 [B, W]: bit t % 32 of word t // 32 is 1 where token t is allowed
    bias_ids: Any  # int32 [B, E], padded with NO_TOKEN
    bias_values: Any  # float32 [B, E]
    want_logprobs: Any  # bool [B]: rank and top tokens are computed
    valid: Any  # bool [B]: False for padding rows and rows that sample nothing in this step
    processor_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → parameter → [B]

    @classmethod
    def greedy(
        cls,
        num_rows: int,
        vocab_size: int,
        *,
        num_lanes: int = 0,
        max_bias: int = MAX_LOGIT_BIAS,
        processors: Sequence[LogitsProcessor] = (),
    ) -> SamplingInputs:
        """Host arrays with every option off and every row padding: not `valid`, on lane `num_lanes` (the last)."""

        def full(value: float | int, dtype: Any) -> np.ndarray:
            return np.full(num_rows, value, dtype)

        return cls(
            temperature=full(0, np.float32),
            top_k=full(0, np.int32),
            top_p=full(1, np.float32),
            min_p=full(0, np.float32),
            typical_p=full(1, np.float32),
            repetition_penalty=full(1, np.float32),
            presence_penalty=full(0, np.float32),
            frequency_penalty=full(0, np.float32),
            seed=np.zeros((num_rows, 2), np.uint32),
            choice=full(0, np.int32),
            position=full(0, np.int32),
            lane=full(num_lanes, np.int32),
            use_penalties=full(False, np.bool_),
            use_mask=full(False, np.bool_),
            token_mask=np.full((num_rows, num_mask_words(vocab_size)), 0xFFFFFFFF, np.uint32),
            bias_ids=np.full((num_rows, max_bias), NO_TOKEN, np.int32),
            bias_values=np.zeros((num_rows, max_bias), np.float32),
            want_logprobs=full(False, np.bool_),
            valid=full(False, np.bool_),
            processor_params=default_params(processors, num_rows),
        )


def num_mask_words(vocab_size: int) -> int:
    """32-bit words in the packed mask of one row."""
    return -(-vocab_size // 32)


def pack_mask(
    vocab_size: int, *, allowed_ids: Iterable[int] | None = None, banned_ids: Iterable[int] = ()
) -> np.ndarray:
    """A token mask, uint32 [ceil(V / 32)]: bit t % 32 of word t // 32 is 1 where token t may be sampled.

    Tokens outside `allowed_ids` (None allows all) and tokens in `banned_ids` may not; bits past the vocabulary are
    0. Masks combine with `&`. Raises `ValueError` for an id outside the vocabulary.
    """
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    if allowed_ids is None:
        bits[:vocab_size] = 1
    else:
        bits[_checked_ids("allowed_ids", allowed_ids, vocab_size)] = 1
    bits[_checked_ids("banned_ids", banned_ids, vocab_size)] = 0
    return np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)


def unpack_mask(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """The inverse of `pack_mask`: bool [V] on the host."""
    words = np.ascontiguousarray(mask, dtype=np.dtype("<u4"))
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def _checked_ids(name: str, ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(list(ids), np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(f"{name}: token id {outside[0]} is outside the vocabulary of {vocab_size} tokens")
    return array
