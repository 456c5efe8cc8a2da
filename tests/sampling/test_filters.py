"""Kept sets against the definitions, through the candidates and through bisection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import filters
from jaxinfer.sampling.filters import kept_weights

from . import reference
from .reference import Options

OPTIONS = [
    Options(temperature=1.0),
    Options(temperature=1.0, top_k=1),
    Options(temperature=0.7, top_k=5),
    Options(temperature=1.3, top_k=130),
    Options(temperature=1.0, top_k=599),
    Options(temperature=1.0, top_k=5000),
    Options(temperature=1.0, top_p=0.1),
    Options(temperature=0.5, top_p=0.9),
    Options(temperature=3.0, top_p=0.97),
    Options(temperature=1.0, top_p=1e-6),
    Options(temperature=1.0, min_p=0.02),
    Options(temperature=2.0, min_p=1.0),
    Options(temperature=1.0, typical_p=0.3),
    Options(temperature=1.0, typical_p=0.95),
    Options(temperature=1.0, top_k=40, top_p=0.8),
    Options(temperature=2.0, top_k=300, top_p=0.9),
    Options(temperature=2.0, top_k=300, min_p=0.001),
    Options(temperature=1.5, top_k=200, top_p=0.9, min_p=0.01, typical_p=0.7),
]


def kept(logits: np.ndarray, rows: list[Options]) -> np.ndarray:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(options, name) for options in rows], dtype)

    # A new function each time: `jit` would otherwise reuse a program traced with another NUM_CANDIDATES.
    @jax.jit
    def weigh(logits, temperature, **options):
        weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None])
        return kept_weights(logits, weights, **options)

    floats = {name: column(name, np.float32) for name in ("temperature", "top_p", "min_p", "typical_p")}
    return np.asarray(weigh(logits, top_k=column("top_k", np.int32), **floats)) > 0


def expected(logits: np.ndarray, rows: list[Options]) -> np.ndarray:
    return np.stack([reference.distribution(x, options) > 0 for x, options in zip(logits, rows, strict=True)])


def random_logits(kind: str, num_rows: int, vocab_size: int = 600, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    if kind == "flat":
        return x * np.float32(0.1)
    if kind == "ties":
        return np.round(x * 2) / np.float32(2)
    if kind == "holes":
        return np.where(rng.random(x.shape) < 0.3, np.float32(-np.inf), x * 3)
    return x * np.float32(3)


@pytest.mark.parametrize("num_candidates", [8, 64, 256])
@pytest.mark.parametrize("kind", ["peaked", "flat", "holes"])
def test_kept_sets_equal_the_reference(kind: str, num_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "NUM_CANDIDATES", num_candidates)
    logits = random_logits(kind, len(OPTIONS), seed=num_candidates)
    np.testing.assert_array_equal(kept(logits, OPTIONS), expected(logits, OPTIONS))


# Only options whose cut no rounding decides: with ties, a mass may equal its target exactly.
TIE_OPTIONS = [
    Options(temperature=1.0, top_k=k, top_p=p, min_p=m)
    for k in (0, 1, 7, 100, 300, 500)
    for p, m in ((1.0, 0.0), (0.617, 0.0), (0.911, 0.0031))
]


@pytest.mark.parametrize("num_candidates", [8, 256])
def test_equal_logits_are_kept_by_lower_id(num_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "NUM_CANDIDATES", num_candidates)
    logits = random_logits("ties", len(TIE_OPTIONS))
    np.testing.assert_array_equal(kept(logits, TIE_OPTIONS), expected(logits, TIE_OPTIONS))


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    rows = [Options(temperature=1.0, top_k=k) for k in (1, 2, 63, 255, 256, 257, 400, 599)]
    counts = kept(np.zeros((len(rows), 600), np.float32), rows)
    assert [list(np.flatnonzero(row)) for row in counts] == [list(range(options.top_k)) for options in rows]


def test_zero_and_minus_zero_are_equal() -> None:
    logits = np.full((2, 600), -5, np.float32)
    logits[:, 100:500:2] = 0.0
    logits[:, 101:500:2] = -0.0
    rows = [Options(temperature=1.0, top_k=350), Options(temperature=1.0, top_k=3)]
    for row, options in zip(kept(logits, rows), rows, strict=True):
        assert list(np.flatnonzero(row)) == list(range(100, 100 + options.top_k))


def test_search_finds_the_turn_over_the_whole_integer_range() -> None:
    turns = np.array([-(2**31) + 5, -7, 0, 1, 2**30, 2**31 - 3], np.int32)
    low = np.full(6, -(2**31), np.int32)
    high = np.full(6, 2**31 - 2, np.int32)
    found, above = filters._search(lambda key: key <= turns, jnp.asarray(low), jnp.asarray(high))
    np.testing.assert_array_equal(found, turns)
    np.testing.assert_array_equal(above, turns + 1)


def test_keys_order_floats() -> None:
    x = np.sort(np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(10.0) ** 20)
    x = np.concatenate([[-1e38, -2e-38], x, [-0.0, 0.0, 2e-38, 1e38]]).astype(np.float32)
    keys = np.asarray(filters._key_of(jnp.asarray(x)))
    np.testing.assert_array_equal(np.less.outer(x, x), np.less.outer(keys, keys))
    np.testing.assert_array_equal(filters._float_of(jnp.asarray(keys)), x)
