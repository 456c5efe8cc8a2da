from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.draw import inverse_cdf
from jaxinfer.sampling.draw import uniforms as uniforms_of

from . import reference

draw = jax.jit(inverse_cdf)
uniforms = jax.jit(uniforms_of)


def grid(*axes: np.ndarray) -> np.ndarray:
    seed, choice, position = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    keys = np.stack([seed, seed * 0 + 3], axis=-1).astype(np.uint32)
    shape = [len(axis) for axis in axes]
    return np.asarray(uniforms(keys, choice.astype(np.int32), position.astype(np.int32))).reshape(shape)


def test_uniforms_are_fixed_for_all_time() -> None:
    seed = np.array([[0, 0], [0, 1], [2**32 - 1, 2**32 - 1]], np.uint32)
    values = uniforms(seed, np.array([0, 1, 7], np.int32), np.array([0, 5, 2**31 - 1], np.int32))
    np.testing.assert_array_equal(np.asarray(values) * 2**24, [4743254, 8575038, 579743])


def test_uniforms_are_uniform_along_every_axis_and_distinct() -> None:
    u = grid(np.arange(16), np.arange(8), np.arange(100, 356))
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    expected = u.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 115  # chi-square, 63 degrees: p = 7e-5
    assert len(np.unique(u)) > u.size * 0.998  # 24 bits: about 32 pairs of 32,768 coincide


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_along_each_axis_are_uncorrelated(axis: int) -> None:
    u = np.moveaxis(grid(np.arange(16), np.arange(16), np.arange(128)), axis, 0)
    for lag in (1, 2, 7):
        a, b = u[:-lag].ravel(), u[lag:].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(a.size) < 4.5


def test_each_part_of_the_key_matters() -> None:
    parts = itertools.product((0, 1), repeat=4)
    values = [
        float(uniforms(np.array([[a, b]], np.uint32), np.array([c], np.int32), np.array([d], np.int32))[0])
        for a, b, c, d in parts
    ]
    assert len(set(values)) == 16


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 5000])
def test_inverse_cdf_equals_float64(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    weights = np.exp(rng.normal(size=(64, vocab_size)) * 2).astype(np.float32)
    weights *= rng.random(weights.shape) < 0.6
    weights[:, vocab_size // 2] = 1
    u = rng.random(64).astype(np.float32)
    tokens = np.asarray(draw(weights, u))
    for row, value, token in zip(weights.astype(np.float64), u, tokens, strict=True):
        p = row / row.sum()
        if reference.boundary_distance(p, value) > 1e-6:
            assert token == reference.token_at(p, value)


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    weights = np.zeros((8, 9000), np.float32)
    weights[np.arange(8), np.arange(8) * 1000 + 17] = [1e-30, 1e-3, 1, 1, 1e5, 1e30, 1e-10, 0.3]
    for u in (0.0, 0.5, 1 - 2**-24):
        np.testing.assert_array_equal(draw(weights, np.full(8, u, np.float32)), np.arange(8) * 1000 + 17)
    random = (np.random.default_rng(0).random((8, 9000)) < 0.5).astype(np.float32) * np.float32(0.1)
    for u in np.linspace(0, 1 - 2**-24, 40, dtype=np.float32):
        tokens = np.asarray(draw(random, np.full(8, u, np.float32)))
        assert (random[np.arange(8), tokens] > 0).all()


def test_the_ends_of_the_interval_give_the_first_and_last_token() -> None:
    weights = jnp.ones((8, 777))
    assert (draw(weights, jnp.zeros(8)) == 0).all()
    assert (draw(weights, jnp.full(8, 1 - 2**-24)) == 776).all()
