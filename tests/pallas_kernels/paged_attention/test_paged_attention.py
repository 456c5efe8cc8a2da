"""Both implementations against float64 NumPy, over ragged rows, groupings, windows, soft caps and sinks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, xla

QUERY_LENS = [1, 20, 0, 7, 1, 33, 1]
CONTEXT_LENS = np.array([5, 20, 0, 300, 129, 450, 1], np.int32)
NUM_PADDING = 9


def oracle(q, k_pages, v_pages, table, query_start, scale, window, softcap, sinks):
    """Attention from its definition, one row and one head at a time."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k_pages.shape[1]
    for row, context in enumerate(CONTEXT_LENS):
        start, end = query_start[row], query_start[row + 1]
        k, v = (np.concatenate([pool[p] for p in table[row]], axis=1).astype(np.float64) for pool in (k_pages, v_pages))
        for token in range(start, end):
            position = context - (end - token)
            low = max(0, position - window + 1) if window else 0
            for head in range(q.shape[1]):
                keys = k[head // group, low : position + 1]
                scores = keys @ q[token, head].astype(np.float64) * scale
                scores = softcap * np.tanh(scores / softcap) if softcap else scores
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (np.exp(sinks[head] - scores.max()) if sinks is not None else 0)
                out[token, head] = weights @ v[head // group, low : position + 1] / total
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "page_size,num_heads,num_kv_heads,tile_queries,window,softcap,with_sinks",
    [
        (16, 9, 3, 1, 0, 0.0, False),
        (16, 9, 3, 16, 50, 0.0, False),
        (32, 4, 4, 1, 0, 0.0, True),
        (32, 4, 1, 4, 130, 20.0, True),
        (16, 4, 4, 16, 1, 0.0, False),
    ],
)
def test_against_float64(implementation, page_size, num_heads, num_kv_heads, tile_queries, window, softcap, with_sinks):
    rng = np.random.default_rng(1)
    width = 512 // page_size
    num_pages = len(QUERY_LENS) * width + 1
    k_pages, v_pages = rng.standard_normal((2, 2, num_pages, num_kv_heads, page_size, 8)).astype(np.float32)
    table = (rng.permutation(num_pages - 1) + 1).reshape(len(QUERY_LENS), width).astype(np.int32)
    query_start = np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32)
    q = rng.standard_normal((query_start[-1] + NUM_PADDING, num_heads, 8)).astype(np.float32)
    sinks = rng.standard_normal(num_heads).astype(np.float32) if with_sinks else None
    arrays = [np.asarray(a) for a in (q, k_pages, v_pages)]
    import jax.numpy as jnp

    got = paged_attention(
        *map(jnp.asarray, arrays), 1, jnp.asarray(table), jnp.asarray(query_start), jnp.asarray(CONTEXT_LENS),
        scale=0.3, window=window, softcap=softcap, sinks=None if sinks is None else jnp.asarray(sinks),
        tile_queries=tile_queries, implementation=implementation,
    )  # fmt: skip
    expected = oracle(q, k_pages[1], v_pages[1], table, query_start, 0.3, window, softcap, sinks)
    np.testing.assert_allclose(np.asarray(got)[: query_start[-1]], expected[: query_start[-1]], atol=3e-6)


def test_unknown_implementation_is_refused():
    import jax.numpy as jnp

    zeros = jnp.zeros((1, 2, 1, 16, 8))
    with pytest.raises(ValueError, match="mosaic"):
        paged_attention(
            jnp.zeros((8, 1, 8)), zeros, zeros, 0, jnp.zeros((1, 1), jnp.int32), jnp.zeros(2, jnp.int32),
            jnp.zeros(1, jnp.int32), implementation="mosaic",
        )  # fmt: skip


def test_the_size_of_a_group_changes_no_bit():
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(2)
    k_pages, v_pages = rng.standard_normal((2, 1, 300, 3, 16, 64)).astype(np.float32)
    table = jnp.asarray((rng.permutation(299)[: 8 * 32] + 1).reshape(8, 32).astype(np.int32))
    q = rng.standard_normal((8, 9, 64)).astype(np.float32)
    lens = jnp.asarray(np.array([500, 1, 127, 128, 129, 300, 512, 0], np.int32))
    starts = jnp.minimum(jnp.arange(9, dtype=jnp.int32), 7)
    found = [
        np.asarray(
            jax.jit(partial(xla.paged_attention, scale=0.125, tiles_per_group=size))(
                q, k_pages, v_pages, 0, table, starts, lens
            )
        )[:7]
        for size in (1, 2, 4)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"), [(3, 3, 64), (8, 4, 64), (8, 2, 128), (4, 1, 32), (2, 4, 80), (2, 4, 96)]
)
def test_a_query_has_the_same_bits_alone_and_in_a_chunk(num_kv_heads, group, head_dim):
    """The shapes of SmolLM2, Llama 3.2 1B, Qwen3 0.6B, a small model with as many KV heads as heads, and odd widths."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(2)
    lens = np.array([300, 16, 127, 128, 129, 200, 256, 33], np.int32)
    k_pages, v_pages = rng.standard_normal((2, 1, 200, num_kv_heads, 16, head_dim)).astype(np.float32)
    table = (rng.permutation(199)[: 8 * 20] + 1).reshape(8, 20).astype(np.int32)
    q = rng.standard_normal((128, num_kv_heads * group, head_dim)).astype(np.float32)

    def attend(q, step, tile_queries, size):
        run = jax.jit(partial(xla.paged_attention, scale=0.125, tile_queries=tile_queries, tiles_per_group=size))
        starts = jnp.arange(9, dtype=jnp.int32) * step
        return np.asarray(run(q, k_pages, v_pages, 0, jnp.asarray(table), starts, jnp.asarray(lens)))

    chunks = attend(q, 16, 16, 2)[15::16]
    for size in (1, 2):
        np.testing.assert_array_equal(attend(q[15::16], 1, 1, size), chunks)
