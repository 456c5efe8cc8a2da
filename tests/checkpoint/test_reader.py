"""What every checkpoint's `read` promises: conversion into a given array, and clear refusals."""

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint.reader import CHUNK_BYTES, Checkpoint, CheckpointError, all_finite, open_checkpoint


def make(folder: Path, **tensors: np.ndarray) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_converts_across_chunk_borders(tmp_path: Path, source: type, target: type) -> None:
    num_columns = CHUNK_BYTES // 2 + 13
    array = np.random.default_rng(0).normal(size=(3, num_columns)).astype(source)
    with make(tmp_path, w=array) as checkpoint:
        out = np.zeros(array.shape, target)
        assert checkpoint.read("w", out) is out
        np.testing.assert_array_equal(out, array.astype(target))


def test_fills_strided_views_in_place(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(70, 9001)).astype(np.float32)
    with make(tmp_path, w=array) as checkpoint:
        stacked = np.zeros((9001, 4, 70), ml_dtypes.bfloat16)
        checkpoint.read("w", stacked[:, 2].T)
    np.testing.assert_array_equal(stacked[:, 2].T, array.astype(ml_dtypes.bfloat16))
    assert not stacked[:, [0, 1, 3]].any()


@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16])
def test_reading_into_an_array_allocates_a_few_megabytes(tmp_path: Path, target: type) -> None:
    array = np.ones((4096, 4096), ml_dtypes.bfloat16)
    with make(tmp_path, w=array) as checkpoint:
        out = np.empty(array.shape, target)
        tracemalloc.start()
        checkpoint.read("w", out)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 8 * CHUNK_BYTES < array.nbytes
    assert out[-1, -1] == 1


def test_refuses_unsuitable_arrays_and_names(tmp_path: Path) -> None:
    with make(tmp_path, w=np.ones((2, 3), np.float32), ids=np.arange(4)) as checkpoint:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' has shape \(2, 3\).*\(3, 2\)"):
            checkpoint.read("w", np.empty((3, 2), np.float32))
        with pytest.raises(CheckpointError, match="'w' holds float32 and cannot be read as int32"):
            checkpoint.read("w", np.empty((2, 3), np.int32))
        with pytest.raises(CheckpointError, match="'ids' holds int64 and cannot be read as float32"):
            checkpoint.read("ids", np.empty(4, np.float32))
        with pytest.raises(CheckpointError, match="there is no tensor 'x' among its 2"):
            checkpoint.read("x")


def test_refuses_values_beyond_the_target_dtype(tmp_path: Path) -> None:
    array = np.ones((2, 3), np.float32)
    array[1, 1] = 1e5
    with (
        make(tmp_path, w=array) as checkpoint,
        pytest.raises(CheckpointError, match="'w' holds values up to 100000, beyond the range of float16"),
    ):
        checkpoint.read("w", np.empty((2, 3), np.float16))


def test_closing_twice_is_harmless_and_reading_then_refused(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, w=np.ones(3, np.float32))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("w")


def test_refuses_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_all_finite_finds_one_nan(dtype: type) -> None:
    array = np.linspace(-400, 400, 64).astype(dtype)
    assert all_finite(array)
    array[5] = np.nan
    assert not all_finite(array)
