"""Which tokens may be sampled: min_p, top_k, top_p and typical_p without sorting the vocabulary.

Tokens are ordered by falling logit, then by rising id. min_p, top_k and top_p each keep a prefix of that order, so
what they keep together ends at one token, the cut. It is looked for among the `NUM_CANDIDATES` likeliest tokens; a
row whose cut lies deeper (a flat distribution, a large top_k) bisects over the values of its logits, and then
over the ids of equal ones. typical_p keeps a prefix of another order and always bisects. Which way a row goes
depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.sampling.logprobs import row_sum, top_tokens

NUM_CANDIDATES = 256
TINY = 1e-37


class Cut(NamedTuple):
    """The last token kept: those of larger value are kept, and those of equal value up to this id."""

    value: Float[Array, " B"]
    last_id: Int[Array, " B"]

    def keeps(self, values: Float[Array, "B V"]) -> Bool[Array, "B V"]:
        ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
        value, last_id = self.value[:, None], self.last_id[:, None]
        return (values > value) | ((values == value) & (ids <= last_id))


def kept_weights(
    logits: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    *,
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    typical_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """`weights` with 0 for every token that is not kept, in the order min_p, top_k, top_p, typical_p.

    `weights` are exp((logits − max) / temperature), largest 1. Each filter sees the distribution that the ones
    before it left, renormalised. top_k keeps the k first tokens; top_p the shortest prefix whose mass reaches p;
    min_p every token at least min_p times as likely as the likeliest; typical_p (Meister et al. 2023) the shortest
    prefix, by distance of −log p from the entropy, whose mass reaches p. At least one token is always kept. A row
    whose options are off (or a top_k of V and more) keeps its weights bit for bit.
    """
    vocab_size = logits.shape[-1]
    top_k = jnp.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    top_p = jnp.where(top_p >= 1, 1.0, jnp.maximum(top_p, TINY))
    floor = jnp.minimum(min_p, 1.0)
    limited = (top_k < vocab_size) | (top_p < 1)

    def cut(weights: Array) -> Array:
        return jnp.where(_prefix_cut(logits, weights, top_k, top_p, limited).keeps(logits), weights, 0.0)

    def typical(weights: Array) -> Array:
        return jnp.where((typical_p < 1)[:, None], _typical(weights, typical_p), weights)

    weights = jnp.where(weights >= floor[:, None], weights, 0.0)
    weights = jax.lax.cond(jnp.any(limited), cut, lambda w: w, weights)
    return jax.lax.cond(jnp.any(typical_p < 1), typical, lambda w: w, weights)


def _prefix_cut(
    logits: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    limited: Bool[Array, " B"],
) -> Cut:
    """Where top_k and then top_p cut the prefix of positive weight; a row that is not `limited` keeps all."""
    num_candidates = min(NUM_CANDIDATES, logits.shape[-1])
    values, ids = top_tokens(logits, num_candidates)
    mass = jnp.take_along_axis(weights, ids, axis=-1)
    ends = jnp.cumsum(mass, axis=-1)
    size = jnp.minimum(top_k, jnp.sum(mass > 0, axis=-1))
    k_inside = (top_k <= num_candidates) | (mass[:, -1] == 0)
    last = jnp.maximum(size - 1, 0)[:, None]
    total = jnp.where(k_inside, jnp.take_along_axis(ends, last, axis=-1)[:, 0], row_sum(weights))
    target = top_p * total
    reached = ends >= target[:, None]
    nucleus = jnp.where((top_p < 1) & jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1) + 1, num_candidates)
    length = jnp.maximum(jnp.minimum(size, nucleus), 1)
    end = (length - 1)[:, None]
    found = Cut(jnp.take_along_axis(values, end, axis=-1)[:, 0], jnp.take_along_axis(ids, end, axis=-1)[:, 0])
    k_off = top_k == logits.shape[-1]
    resolved = k_inside | (k_off & jnp.any(reached, axis=-1))
    active = limited & ~resolved

    def deeper() -> Cut:
        return _bisected_prefix(logits, weights, top_k, top_p, active)

    deep = jax.lax.cond(jnp.any(active), deeper, lambda: found)
    everything = Cut(jnp.full_like(found.value, -jnp.inf), jnp.full_like(found.last_id, logits.shape[-1]))
    return _select(limited, _select(active, deep, found), everything)


def _bisected_prefix(logits: Array, weights: Array, top_k: Array, top_p: Array, active: Array) -> Cut:
    """top_k and then top_p, both by bisection, for the rows that are `active`."""
    with_k = active & (top_k < logits.shape[-1])
    with_p = active & (top_p < 1)
    counted = (weights > 0).astype(jnp.float32)  # exact: a vocabulary is far below 2^24
    k_cut = _bisect(logits, counted, top_k.astype(jnp.float32), with_k)
    weights = jnp.where(with_k[:, None] & ~k_cut.keeps(logits), 0.0, weights)
    p_cut = _bisect(logits, weights, top_p * row_sum(weights), with_p)
    return _select(with_p, p_cut, k_cut)


def _typical(weights: Float[Array, "B V"], typical_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    total = row_sum(weights)
    log_p = jnp.where(weights > 0, jnp.log(weights), 0.0) - jnp.log(total)[:, None]
    entropy = -row_sum(jnp.where(weights > 0, weights * log_p, 0.0)) / total
    closeness = jnp.where(weights > 0, -jnp.abs(log_p + entropy[:, None]), -jnp.inf)
    target = jnp.maximum(typical_p, TINY) * total
    cut = _bisect(closeness, weights, target, typical_p < 1)
    return jnp.where(cut.keeps(closeness), weights, 0.0)


def _bisect(
    values: Float[Array, "B V"], weights: Float[Array, "B V"], target: Float[Array, " B"], active: Bool[Array, " B"]
) -> Cut:
    """The shortest prefix, by falling value and rising id, whose weights sum to at least `target`.

    Sums of more tokens are never smaller, also in floating point, because the order of addition is fixed; so
    bisection is exact for these sums. Rows that are not `active` give an arbitrary cut and cost no iteration.
    """
    present = weights > 0
    peak = jnp.max(jnp.where(present, values, -jnp.inf), axis=-1)
    bottom = jnp.min(jnp.where(present, values, jnp.inf), axis=-1)
    active = active & (peak >= bottom)

    def weigh(kept: Array) -> Array:
        return row_sum(jnp.where(kept, weights, 0.0))

    def enough(key: Array) -> Array:
        return weigh(values >= _float_of(key)[:, None]) >= target

    # Kept at `low`, not kept at `high`; both are keys, integers in the order of the floats.
    low = jnp.where(active, _key_of(bottom), 0)
    high = jnp.where(active, _key_of(peak) + 1, 1)
    low, _ = _search(enough, low, high)
    value = jnp.where(active, _float_of(low), 0.0)

    # Among equal values, the lowest last id that is enough. One such token needs no search.
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    tied = present & (values == value[:, None])
    first = jnp.min(jnp.where(tied, ids, values.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(tied, ids, -1), axis=-1)
    above = values > value[:, None]

    def short(end: Array) -> Array:
        return weigh(above | (tied & (ids <= end[:, None]))) < target

    search = active & (last > first)
    _, last_id = _search(short, jnp.where(search, first - 1, last - 1), last)
    return Cut(value, last_id)


def _search(holds, low: Int[Array, " B"], high: Int[Array, " B"]) -> tuple[Array, Array]:
    """Neighbouring integers between which `holds` turns from true (at `low`, not tried) to false (at `high`)."""

    def unresolved(bounds: tuple[Array, Array]) -> Array:
        # Written without high − low, which can overflow.
        return jnp.any(bounds[0] + 1 < bounds[1])

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        open_ = low + 1 < high
        true = holds(middle)
        return jnp.where(open_ & true, middle, low), jnp.where(open_ & ~true, middle, high)

    return jax.lax.while_loop(unresolved, halve, (low, high))


def _key_of(x: Float[Array, " B"]) -> Int[Array, " B"]:
    """Integers in the order of finite float32 values; both zeros give 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)


def _float_of(key: Int[Array, " B"]) -> Float[Array, " B"]:
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, jnp.int32(-(2**31)) - key, key), jnp.float32)


def _select(condition: Bool[Array, " B"], yes: Cut, no: Cut) -> Cut:
    return Cut(jnp.where(condition, yes.value, no.value), jnp.where(condition, yes.last_id, no.last_id))
