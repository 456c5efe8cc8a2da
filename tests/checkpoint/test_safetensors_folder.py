"""Safetensors folders: single and sharded, every float type, refusals of malformed files, and header fuzzing."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxinfer.checkpoint.reader import CheckpointError, open_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 8}


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(5, 7)).astype(np.float32)
    return {
        "w.f32": values,
        "w.f16": values.astype(np.float16),
        "w.bf16": values.astype(ml_dtypes.bfloat16),
        "w.f64": values.astype(np.float64),
        "w.f8": values.astype(ml_dtypes.float8_e4m3fn),
        "w.i32": rng.integers(-9, 9, (3, 2, 2), np.int32),
        "w.scalar": np.array(2.5, np.float32),
    }


def make_folder(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_sharded(folder: Path, shards: dict[str, dict[str, np.ndarray]], weight_map: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_single_file_reads_back_exactly(tmp_path: Path) -> None:
    expected = arrays()
    folder = make_folder(tmp_path / "m", expected)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {"eos_token_id": 2}
        assert checkpoint.tensors.keys() == expected.keys()
        assert checkpoint.tensors["w.bf16"].dtype == "BF16"
        for name, array in expected.items():
            got = checkpoint.read(name)
            assert got.dtype == array.dtype and checkpoint.tensors[name].num_bytes == array.nbytes
            np.testing.assert_array_equal(got, array)


def test_weights_file_can_be_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {"w": np.ones(3, np.float32)})
    with open_checkpoint(folder / "model.safetensors") as checkpoint:
        assert checkpoint.config == CONFIG and list(checkpoint.tensors) == ["w"]


def test_shards_read_as_one(tmp_path: Path) -> None:
    expected = arrays()
    names = list(expected)
    files = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    shards = {file: {name: expected[name] for name in part} for file, part in files.items()}
    folder = make_sharded(tmp_path / "m", shards, {name: file for file, part in files.items() for name in part})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "a.safetensors", "y": "gone.safetensors"}, r"gone\.safetensors: cannot be opened"),
        ({"x": "a.safetensors", "y": "a.safetensors"}, r"a\.safetensors: tensor 'y'.*not in it"),
        ({"x": "../a.safetensors"}, r"'x' is said to be in '\.\./a\.safetensors'"),
        ({"x": "a.bin"}, "not a safetensors file"),
        ({"x": 3}, "not a safetensors file"),
        ({"x": "\ud800.safetensors"}, "cannot be opened"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_refuses_bad_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = make_sharded(tmp_path / "m", {"a.safetensors": {"x": np.ones(2, np.float32)}}, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    one = {"x": np.ones(2, np.float32)}
    two = {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    folder = make_sharded(tmp_path / "m", {"a.safetensors": one, "b.safetensors": two}, weight_map)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'x' is also in a\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["w.f32", "w.f16", "w.bf16", "w.f64"])
def test_refuses_nonfinite_values(tmp_path: Path, name: str, bad: float) -> None:
    tensors = arrays()
    tensors[name][3, 1] = bad
    with (
        open_checkpoint(make_folder(tmp_path / "m", tensors)) as checkpoint,
        pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}.*index 22"),
    ):
        checkpoint.read(name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_refuses_pickled_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"PK\3\4")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name}: pickled.*convert them to safetensors"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors nor"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "holds 2 safetensors files"),
        ({"jaxinfer.json": b"{}"}, "is a converted checkpoint"),
        ({"model.safetensors": b""}, "config.json: cannot be read"),
        ({"model.safetensors": b"", "config.json": b"{"}, "config.json: not valid JSON"),
        ({"model.safetensors": b"", "config.json": b"[]"}, "config.json: .* must be an object"),
        ({"model.safetensors": b"", "config.json": b"[" * 100_000}, "config.json: not valid JSON"),
    ],
)
def test_refuses_incomplete_folders(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def make_file(header: object, data_bytes: int = 32, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data_bytes)


def record(begin: int = 0, end: int = 32, shape: Any = (8,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


MALFORMED = {
    "empty": (b"", "claims a header"),
    "short": (b"\1\0", "claims a header"),
    "length": (make_file({}, length=1 << 63), "claims a header of 9223372036854775808 bytes"),
    "not utf-8": (make_file(b"\xff\xff"), "not valid JSON"),
    "not json": (make_file(b"{x}"), "not valid JSON"),
    "huge number": (make_file(b'{"w":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "list": (make_file([]), "must be an object"),
    "duplicate": (make_file(b'{"w":{},"w":{}}'), "'w' twice"),
    "not a record": (make_file({"w": 3}), "'w' has unsupported dtype"),
    "dtype": (make_file({"w": record(dtype="F4")}), "'w' has unsupported dtype 'F4'"),
    "dtype kind": (make_file({"w": record(dtype=[1])}), "'w' has unsupported dtype"),
    "negative": (make_file({"w": record(shape=(-8,))}), "'w' has shape"),
    "bool": (make_file({"w": record(shape=(True, 8))}), "'w' has shape"),
    "float": (make_file({"w": record(shape=(8.0,))}), "'w' has shape"),
    "dims": (make_file({"w": record(shape=(1,) * 99)}), "'w' has shape"),
    "product": (make_file({"w": record(shape=(1 << 62, 1 << 62))}), "'w' of shape .* needs"),
    "backwards": (make_file({"w": record(32, 0)}), "'w' of shape .* given -32"),
    "offset": (make_file({"w": record(1 << 60, (1 << 60) + 32)}), "'w' leaves a gap"),
    "overlap": (make_file({"v": record(), "w": record(16, 48)}, 48), "'w' overlaps"),
    "gap": (make_file({"v": record(), "w": record(40, 72)}, 72), "'w' leaves a gap"),
    "truncated": (make_file({"w": record()}, 31), "'w' ends at byte"),
    "trailing": (make_file({"w": record()}, 33), "1 bytes follow"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_refuses_malformed_files(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        open_checkpoint(tmp_path)


TINY = make_file({"__metadata__": {"format": "pt"}, "a.w": record(), "b.w": record(32, 48, (2, 4), "BF16")}, 48)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(TINY) - 1), st.one_of(st.binary(min_size=1, max_size=8), st.text('0123456789[]{}",:-e'))
        ),
        max_size=4,
    ),
    length=st.one_of(st.just(len(TINY)), st.integers(0, len(TINY))),
)
def test_mutated_headers_only_raise_checkpoint_errors(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes | str]], length: int
) -> None:
    content = bytearray(TINY)
    for position, edit in edits:
        replacement = edit.encode() if isinstance(edit, str) else edit
        content[position : position + len(replacement)] = replacement
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content[:length])
    tracemalloc.start()
    try:
        with open_checkpoint(folder) as checkpoint:
            for name in checkpoint.tensors:
                checkpoint.read(name)
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < length + (3 << 20)
