from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.sampling.logprobs import chosen_logprobs, first_argmax, prompt_logprobs, top_tokens

from . import reference

describe = jax.jit(prompt_logprobs, static_argnums=2)


def tile(num_rows: int, vocab_size: int, scale: float = 4.0) -> np.ndarray:
    return (np.random.default_rng(vocab_size).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)


@pytest.mark.parametrize("scale", [0.01, 4.0, 12.0])
@pytest.mark.parametrize("vocab_size", [7, 1000, 49152])
def test_prompt_logprobs_equal_float64(vocab_size: int, scale: float) -> None:
    logits = tile(8, vocab_size, scale)
    targets = np.arange(8, dtype=np.int32) % vocab_size
    logprob, rank, top_ids, top = describe(logits, targets, 5)
    expected = reference.log_softmax(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")
    rows = np.arange(8)
    np.testing.assert_allclose(logprob, expected[rows, targets], atol=1e-5, rtol=0)
    np.testing.assert_allclose(jax.jit(chosen_logprobs)(logits, targets), expected[rows, targets], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(top_ids, order[:, :5])
    np.testing.assert_allclose(top, expected[rows[:, None], order[:, :5]], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(rank, 1 + (logits > logits[rows, targets][:, None]).sum(-1))


def test_rank_counts_strictly_larger_logits() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0]], np.float32)
    ranks = [int(describe(logits, np.array([t], np.int32), 0)[1][0]) for t in range(4)]
    assert ranks == [4, 1, 1, 3]


@pytest.mark.parametrize("vocab_size", [40, 999, 5000])
@pytest.mark.parametrize("num", [0, 1, 20, 40])
def test_top_tokens_order_equal_logits_by_id(vocab_size: int, num: int) -> None:
    logits = np.round(tile(8, vocab_size, 1.0))
    logits = np.where(logits == 2, -np.inf, logits).astype(np.float32)  # rint leaves both zeros among them
    values, ids = jax.jit(top_tokens, static_argnums=1)(logits, num)
    order = np.argsort(-(logits + 0.0), axis=-1, kind="stable")[:, :num]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=-1))


@pytest.mark.parametrize("vocab_size", [1, 127, 5000])
def test_first_argmax_takes_the_lowest_id(vocab_size: int) -> None:
    logits = np.round(tile(16, vocab_size, 1.0))
    ids, peak = jax.jit(first_argmax)(logits)
    np.testing.assert_array_equal(ids, logits.argmax(-1))
    np.testing.assert_array_equal(peak, logits.max(-1))
