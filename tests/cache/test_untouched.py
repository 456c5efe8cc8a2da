"""Zeros that nobody wrote: they are zeros, they take no memory, and a donating program updates them in place."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import untouched
from jaxinfer.cache.untouched import zeros

MIB = 1 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1000), (2, 3, 1 << 18), (0, 4), ()])
def test_they_are_zeros_also_in_memory_that_was_used(shape, dtype):
    with jax.enable_x64(True) if dtype == "float64" else jax.enable_x64(False):
        for _ in range(3):
            array = zeros(shape, dtype)
            assert (array.shape, array.dtype) == (shape, jnp.dtype(dtype))
            np.testing.assert_array_equal(np.asarray(array).astype(np.float64), np.zeros(shape))
            jax.block_until_ready(jnp.full(shape, 7, dtype))  # freed at once: what the next one is likely to get


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere XLA fills the array")
def test_they_take_memory_only_where_they_are_written():
    assert untouched._register()
    before = resident_bytes()
    array = jax.block_until_ready(zeros((256, MIB // 4), "float32"))
    assert resident_bytes() - before < 32 * MIB
    place = array.unsafe_buffer_pointer()
    put = jax.jit(lambda x, row: x.at[row, 5].set(1.0), donate_argnums=0).lower(array, 0).compile()
    array = put(array, 200)
    assert array.unsafe_buffer_pointer() == place and resident_bytes() - before < 64 * MIB
    host = np.asarray(array)
    assert host[200, 5] == 1 and host.sum() == 1


def test_where_xla_does_not_take_the_call_it_fills_the_array(monkeypatch):
    monkeypatch.setattr(untouched, "_register", lambda: False)
    np.testing.assert_array_equal(np.asarray(zeros((4, 5), "float32")), np.zeros((4, 5)))


def test_memory_that_cannot_be_forgotten_is_overwritten(monkeypatch):
    class Refusing:
        madvise = staticmethod(lambda *_: -1)

    monkeypatch.setattr(untouched.ctypes, "CDLL", lambda name: Refusing)
    memory = np.full(30_000, 7, np.uint8)
    untouched._forget(memory.ctypes.data + 3, len(memory) - 10)
    assert memory[:3].tolist() == [7] * 3 and memory[-7:].tolist() == [7] * 7 and not memory[3:-7].any()


def test_asking_for_the_shape_first_changes_nothing():
    untouched._register.cache_clear()
    shape = jax.eval_shape(lambda: untouched.zeros((3, 5), "float32"))
    assert shape.shape == (3, 5)
    assert untouched._register() == (sys.platform == "linux" and jax.default_backend() == "cpu")
