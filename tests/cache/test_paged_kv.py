"""Pages are copied in place, every source before any target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.paged_kv import PagedKVCache, copy_pages


def test_copies_read_every_source_first():
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(2, 9, 3, 4, 8)).astype(np.float32) for _ in range(2))
    source, target = np.array([1, 2, 5, 0]), np.array([2, 3, 1, 0])  # 1 → 2 → 3, 5 → 1, and padding
    after = copy_pages(PagedKVCache(jnp.asarray(k), jnp.asarray(v)), jnp.asarray(source), jnp.asarray(target))
    for given, found in ((k, after.k), (v, after.v)):
        expected = given.copy()
        expected[:, target] = given[:, source]
        np.testing.assert_array_equal(found, expected)


def test_a_copy_updates_the_cache_in_place():
    cache = PagedKVCache(*[jax.ShapeDtypeStruct((30, 500, 3, 16, 64), jnp.float32)] * 2)
    pages = jax.ShapeDtypeStruct((8,), np.int32)
    program = jax.jit(copy_pages, donate_argnums=0).lower(cache, pages, pages).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * cache.k.size * 4
    assert memory.temp_size_in_bytes < 0.1 * cache.k.size * 4
