"""Sums over a row: right, and the same bits however many rows there are."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.layers.reduce import row_sum


@pytest.mark.parametrize("shape", [(32,), (64,), (1, 256), (8, 128), (288,), (500,), (512,), (576,)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(shape):
    x = np.random.default_rng(0).normal(size=(256, *shape)).astype(np.float32)
    run = jax.jit(row_sum)
    few = np.asarray(run(x[:8]))
    np.testing.assert_allclose(few, x[:8].astype(np.float64).sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    for num_rows in (9, 16, 32, 64, 128, 256):
        np.testing.assert_array_equal(np.asarray(run(x[:num_rows]))[:8], few)
