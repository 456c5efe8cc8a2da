"""GGUF files: a bounded header parser and streaming dequantization.

The header is parsed here because the `gguf` package's own reader trusts the lengths it finds; the package supplies
what a tensor's bytes mean (`gguf.quants`), but for two common types, where it is slow. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    magic "GGUF" | version u32 | num_tensors u64 | num_keys u64
    num_keys    × (key string | type u32 | value)
    num_tensors × (name string | num_dims u32 | dims u64… fastest first | type u32 | offset u64)
    padding to general.alignment | tensor data

Tensors are given as they lie in the file: llama-architecture files keep query and key rows in the order of
interleaved rotary pairs, and undoing that is the model's business.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxinfer.checkpoint.reader import CHUNK_BYTES, Checkpoint, CheckpointError, TensorInfo, all_finite, read_exact

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_ARRAY_ELEMENTS = 1 << 22
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4

_REMEDY = "the file is damaged or truncated, download it again"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class BlockType:
    """A tensor type: `block_size` elements in `block_bytes` bytes, with float16 scales at byte `scale_offsets`."""

    name: str
    block_size: int
    block_bytes: int
    scale_offsets: tuple[int, ...] = ()


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, (0,)),
    3: BlockType("Q4_1", 32, 20, (0, 2)),
    6: BlockType("Q5_0", 32, 22, (0,)),
    7: BlockType("Q5_1", 32, 24, (0, 2)),
    8: BlockType("Q8_0", 32, 34, (0,)),
    12: BlockType("Q4_K", 256, 144, (0, 2)),
    13: BlockType("Q5_K", 256, 176, (0, 2)),
    14: BlockType("Q6_K", 256, 210, (208,)),
    30: BlockType("BF16", 1, 2),
}
_TYPES_BY_NAME = {block.name: block for block in BLOCK_TYPES.values()}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    offset: int


class GGUFCheckpoint(Checkpoint):
    """An open GGUF file. `config` is its metadata; quantized tensors are read as float32."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        """Parse and check the whole header; no tensor data is read.

        Raises:
            CheckpointError: not a GGUF file, or one whose header does not describe the file's bytes.
        """
        self.path = path
        self.generation_config = {}
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path") from None
        try:
            header = _Header(self._file, path)
            self.config = header.metadata
            self._entries = header.entries
        except BaseException:
            self._file.close()
            raise
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def close(self) -> None:
        self._file.close()

    def _file_of(self, name: str) -> Path:
        return self.path

    def _dtype_of(self, name: str) -> np.dtype:
        return np.dtype(np.float16) if self.tensors[name].dtype == "F16" else np.dtype(np.float32)

    def _chunks(self, name: str) -> Iterator[np.ndarray]:
        entry = self._entries[name]
        block = _TYPES_BY_NAME[entry.info.dtype]
        buffer = bytearray(max(1, CHUNK_BYTES // 4 // block.block_size) * block.block_bytes)
        view = memoryview(buffer)
        for start in range(0, entry.info.num_bytes, len(buffer)):
            part = view[: min(len(buffer), entry.info.num_bytes - start)]
            read_exact(self._file, entry.offset + start, part, self.path, name)
            data = np.frombuffer(part, np.uint8)
            _check_scales(data, block, self.path, name)
            yield dequantize(data, block.name)


def dequantize(data: np.ndarray, type_name: str) -> np.ndarray:
    """Decode whole blocks of bytes [n] to a flat array: float16 for "F16", float32 for every other type."""
    if type_name == "F16":
        return data.view(np.float16)
    if type_name in ("Q4_1", "Q8_0"):
        return _dequantize_linear(data, _TYPES_BY_NAME[type_name])
    from gguf import GGMLQuantizationType, quants

    # One row, since the package loops over groups of sixteen rows in Python.
    return quants.dequantize(data.reshape(1, -1), GGMLQuantizationType[type_name]).reshape(-1)


def _dequantize_linear(data: np.ndarray, block: BlockType) -> np.ndarray:
    """The types of the default model, bit for bit as the package has them, in a third of its passes over memory.

    Q4_1 is scale · code + minimum with codes of four bits, first the low halves of its bytes and then the high ones;
    Q8_0 is scale · code with signed bytes.
    """
    blocks = data.reshape(-1, block.block_bytes)
    head_bytes = 2 * len(block.scale_offsets)
    scales = np.ascontiguousarray(blocks[:, :head_bytes]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(blocks[:, head_bytes:])
    values = np.empty((len(blocks), block.block_size), np.float32)
    if block.name == "Q8_0":
        values[...] = codes.view(np.int8)
    else:
        half = block.block_size // 2
        values[:, :half] = codes & 15
        values[:, half:] = codes >> 4
    values *= scales[:, :1]
    if len(block.scale_offsets) > 1:
        values += scales[:, 1:]
    return values.reshape(-1)


def _check_scales(data: np.ndarray, block: BlockType, path: Path, name: str) -> None:
    """Refuse blocks whose float16 scales or minima are NaN or infinite."""
    blocks = data.reshape(-1, block.block_bytes)
    for offset in block.scale_offsets:
        scales = np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)
        if not all_finite(scales):
            raise CheckpointError(f"{path}: tensor {name!r} ({block.name}) has a NaN or infinite scale; {_REMEDY}")


class _Header:
    """Reads a GGUF header front to back, checking each length against the bytes that are left."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._size = file.seek(0, 2)
        self._pos = file.seek(0)
        self._num_elements = 0
        num_tensors, num_keys = self._preamble()
        self.metadata = self._metadata(num_keys)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise self._error("is one part of a split model; join the parts with llama-gguf-split --merge")
        found = [self._tensor() for _ in range(num_tensors)]
        self.entries = self._place(found)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._pos:
            raise self._error(
                f"{what} needs {count} bytes at offset {self._pos} of a file of {self._size} bytes; {_REMEDY}"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise self._error(f"{what} could not be read; {_REMEDY}")
        self._pos += count
        return data

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str) -> str:
        data = self._take(self._number("<Q", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not valid UTF-8; {_REMEDY}") from None

    def _preamble(self) -> tuple[int, int]:
        magic = self._take(4, "the magic number")
        if magic != b"GGUF":
            raise self._error(f"starts with {magic!r} and not with b'GGUF'; give a GGUF file or a safetensors folder")
        version = self._number("<I", "the format version")
        if version not in (2, 3):
            kind = "is big-endian" if version in (2 << 24, 3 << 24) else f"has GGUF version {version}"
            raise self._error(f"{kind}; convert it to little-endian GGUF version 3")
        num_tensors = self._number("<Q", "the tensor count")
        num_keys = self._number("<Q", "the metadata count")
        # The smallest tensor record takes 32 bytes and the smallest key 13.
        if num_tensors > min(MAX_TENSORS, self._size // 32) or num_keys > min(MAX_KEYS, self._size // 13):
            raise self._error(
                f"claims {num_tensors} tensors and {num_keys} metadata keys in {self._size} bytes; {_REMEDY}"
            )
        return num_tensors, num_keys

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._string(f"metadata key {index}")
            if key in found:
                raise self._error(f"metadata key {key[:200]!r} appears twice; write the file again")
            found[key] = self._value(self._number("<I", "a value's type"), f"metadata {key[:200]!r}", 0)
        return found

    def _value(self, kind: int, what: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        if kind not in _SCALARS:
            raise self._error(f"{what} has unknown value type {kind}; {_REMEDY}")
        return self._scalars(kind, 1, what)[0]

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize, what), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()

    def _array(self, what: str, depth: int) -> list[Any]:
        kind = self._number("<I", what)
        count = self._number("<Q", what)
        self._num_elements += count
        # Every element takes at least one byte; a list takes more than that, hence the fixed limit besides.
        if count > self._size - self._pos or self._num_elements > MAX_ARRAY_ELEMENTS or depth > MAX_ARRAY_DEPTH:
            raise self._error(
                f"{what} is an array of {count} elements at depth {depth} with {self._size - self._pos} bytes left "
                f"(at most {MAX_ARRAY_ELEMENTS} elements and {MAX_ARRAY_DEPTH} levels are read); {_REMEDY}"
            )
        if kind in _SCALARS:
            return self._scalars(kind, count, what)
        if kind == _STRING:
            return self._strings(count, what)
        return [self._value(kind, what, depth) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """What `_string` gives, `count` times, in one loop: a vocabulary has a hundred thousand of them."""
        read, left, found = self._file.read, self._size - self._pos, []
        for _ in range(count):
            head = read(8)
            length = int.from_bytes(head, "little")
            left -= 8 + length
            data = read(length) if left >= 0 else b""
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = None
            if text is None or left < 0 or len(data) != length:
                self._file.seek(self._pos)  # once more, to say what is wrong with it
                text = self._string(what)
            else:
                self._pos += 8 + length
            found.append(text)
        return found

    def _tensor(self) -> _Entry:
        name = self._string("a tensor's name")
        what = f"tensor {name[:200]!r}"
        num_dims = self._number("<I", what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"{what} has {num_dims} dimensions, not 1 to {MAX_DIMS}; {_REMEDY}")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, what))
        type_id = self._number("<I", what)
        offset = self._number("<Q", what)
        block = BLOCK_TYPES.get(type_id)
        if block is None:
            raise self._error(
                f"{what} has unsupported type {_type_name(type_id)}; "
                f"quantize the model to one of {', '.join(_TYPES_BY_NAME)}"
            )
        if dims[0] % block.block_size or 0 in dims:
            raise self._error(
                f"{what} has rows of {dims[0]} elements and dims {dims}, which {block.name} blocks of "
                f"{block.block_size} cannot fill; {_REMEDY}"
            )
        num_bytes = math.prod(dims) // block.block_size * block.block_bytes
        return _Entry(TensorInfo(name, tuple(reversed(dims)), block.name, num_bytes), offset)

    def _place(self, found: list[_Entry]) -> dict[str, _Entry]:
        """Turn offsets into file positions; check alignment, bounds, names and overlaps."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"general.alignment={alignment!r} is not a power of two from 8 to 1048576; {_REMEDY}")
        data_start = -(-self._pos // alignment) * alignment
        placed: dict[str, _Entry] = {}
        for entry in found:
            name, offset, num_bytes = entry.info.name, entry.offset, entry.info.num_bytes
            if name in placed:
                raise self._error(f"tensor {name[:200]!r} appears twice; write the file again")
            if offset % alignment:
                raise self._error(
                    f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}; {_REMEDY}"
                )
            if data_start + offset + num_bytes > self._size:
                raise self._error(
                    f"tensor {name!r} needs {num_bytes} bytes at offset {data_start + offset} of a file of "
                    f"{self._size} bytes; {_REMEDY}"
                )
            placed[name] = _Entry(entry.info, data_start + offset)
        ordered = sorted(placed.values(), key=lambda entry: entry.offset)
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.offset + left.info.num_bytes > right.offset:
                raise self._error(f"tensors {left.info.name!r} and {right.info.name!r} overlap; {_REMEDY}")
        return placed


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"
