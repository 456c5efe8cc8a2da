"""What sampling remembers of each lane, on the device: token counts for the penalties, and the last token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Per-lane state, S = lanes + 1; the last lane belongs to padding rows and holds nothing of value.

    Leaves may also be `ShapeDtypeStruct`, while a step is compiled ahead of time.
    """

    output_counts: Any  # int32 [S, V]: how often the lane's sequence sampled each token
    prompt_seen: Any  # bool [S, V]: the tokens that its prompt contains
    last_token: Any  # int32 [S]: the token sampled last, input of the next decode step


def init_state(num_lanes: int, vocab_size: int) -> SamplingState:
    """Empty state for `num_lanes` lanes and the padding lane: (5·V + 4)·(num_lanes + 1) bytes."""
    shape = (num_lanes + 1, vocab_size)
    # From the host: for each `jnp.zeros` XLA would compile a program. Copied, since the state is donated.
    return jax.device_put(
        SamplingState(
            output_counts=np.zeros(shape, np.int32),
            prompt_seen=np.zeros(shape, np.bool_),
            last_token=np.zeros(num_lanes + 1, np.int32),
        ),
        may_alias=False,
    )


@partial(jax.jit, donate_argnums=0)
def set_lane(
    state: SamplingState,
    lane: ArrayLike,
    output_counts_row: ArrayLike,
    prompt_seen_row: ArrayLike,
    last_token: ArrayLike,
) -> SamplingState:
    """Give lane `lane` (int32 scalar) to a sequence: its counts int32 [V], prompt tokens bool [V] and last token.

    `state` is donated. A resumed sequence passes the counts of what it had already sampled.
    """
    return SamplingState(
        output_counts=state.output_counts.at[lane].set(jnp.asarray(output_counts_row, jnp.int32)),
        prompt_seen=state.prompt_seen.at[lane].set(jnp.asarray(prompt_seen_row, jnp.bool_)),
        last_token=state.last_token.at[lane].set(jnp.asarray(last_token, jnp.int32)),
    )


def record_tokens(state: SamplingState, lane: Array, tokens: Array, valid: Array) -> SamplingState:
    """Count the sampled `tokens` int32 [B] in their lanes and remember them; rows that are not `valid` add nothing."""
    padding_lane = state.last_token.shape[0] - 1
    lane = jnp.where(valid, lane, padding_lane)
    return SamplingState(
        output_counts=state.output_counts.at[lane, tokens].add(valid.astype(jnp.int32)),
        prompt_seen=state.prompt_seen,
        last_token=state.last_token.at[lane].set(tokens),
    )
