"""Hugging Face folders of safetensors files: one file, or shards listed in an index.

Read here rather than by the `safetensors` library, whose NumPy door has no bfloat16 and maps whole files.
Format: https://github.com/huggingface/safetensors#format

    header_bytes u64 | JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"} | tensor data
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.reader import (
    CHUNK_BYTES,
    MAX_JSON_BYTES,
    PICKLE_SUFFIXES,
    Checkpoint,
    CheckpointError,
    TensorInfo,
    parse_json_object,
    pickle_refused,
    read_exact,
    read_json,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_REMEDY = "the file is damaged or truncated, download it again"
_MAX_DIMS = 8
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    file: Path
    offset: int


class SafetensorsCheckpoint(Checkpoint):
    """An open Hugging Face folder. `config` is `config.json`; tensors are read in their own dtype."""

    format = "safetensors"

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        """Read the JSON files and check every shard's header; no tensor data is read.

        `weights` names one safetensors file, and the folder's index is then not consulted.

        Raises:
            CheckpointError: a file is missing, malformed or pickled, or the shards disagree with the index.
        """
        self.path = folder if weights is None else weights
        self._files: dict[Path, IO[bytes]] = {}
        listed: dict[str, str] | None = None
        if weights is None:
            weights, listed = _find_weights(folder)
        self.config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        shards = [weights] if listed is None else [folder / name for name in dict.fromkeys(listed.values())]
        self._entries: dict[str, _Entry] = {}
        try:
            for shard in shards:
                self._add_shard(shard)
            if listed is not None:
                self._check_index(folder, listed)
        except BaseException:
            self.close()
            raise
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file_of(self, name: str) -> Path:
        return self._entries[name].file

    def _dtype_of(self, name: str) -> np.dtype:
        return _DTYPES[self.tensors[name].dtype]

    def _chunks(self, name: str) -> Iterator[np.ndarray]:
        entry, dtype = self._entries[name], self._dtype_of(name)
        view = memoryview(bytearray(min(CHUNK_BYTES, entry.info.num_bytes)))
        for start in range(0, entry.info.num_bytes, CHUNK_BYTES):
            part = view[: min(CHUNK_BYTES, entry.info.num_bytes - start)]
            read_exact(self._files[entry.file], entry.offset + start, part, entry.file, name)
            yield np.frombuffer(part, dtype)

    def _add_shard(self, path: Path) -> None:
        try:
            file = self._files[path] = path.open("rb")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error}); download the missing part of the checkpoint"
            ) from None
        for entry in _read_header(file, path):
            other = self._entries.get(entry.info.name)
            if other is not None:
                raise CheckpointError(
                    f"{path}: tensor {entry.info.name[:200]!r} is also in {other.file.name}; "
                    "delete the file that is left over"
                )
            self._entries[entry.info.name] = entry

    def _check_index(self, folder: Path, listed: dict[str, str]) -> None:
        for name, shard in listed.items():
            entry = self._entries.get(name)
            if entry is None or entry.file.name != shard:
                raise CheckpointError(
                    f"{folder / shard}: tensor {name!r}, which {INDEX_NAME} lists, is not in it; "
                    "download the folder again"
                )


def _find_weights(folder: Path) -> tuple[Path, dict[str, str] | None]:
    """The single weights file and None, or the index file and its map from tensor to shard name."""
    if (folder / SINGLE_NAME).is_file():
        return folder / SINGLE_NAME, None
    if (folder / INDEX_NAME).is_file():
        return folder / INDEX_NAME, _read_index(folder / INDEX_NAME)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return folder / found[0], None
    if found:
        raise CheckpointError(
            f"{folder}: holds {len(found)} safetensors files ({', '.join(found[:3])} …) and no {INDEX_NAME} "
            "to say how they belong together; download the index, or name one file"
        )
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickled:
        raise pickle_refused(folder / pickled[0])
    if "jaxinfer.json" in names:
        raise CheckpointError(f"{folder}: is a converted checkpoint; restore it with jaxinfer.checkpoint.orbax")
    raise CheckpointError(
        f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; give a Hugging Face folder of safetensors"
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map of tensors to files; {_REMEDY}")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard == Path(shard).name and shard.endswith(".safetensors")
        if not plain or "\0" in shard:
            raise CheckpointError(
                f"{path}: tensor {name[:200]!r} is said to be in {str(shard)[:200]!r}, which is not a safetensors file "
                "of this folder; download the index again"
            )
    return weight_map


def _read_header(file: IO[bytes], path: Path) -> list[_Entry]:
    """Parse one file's header and check that its tensors fill the rest of the file exactly, without overlap."""
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
        raise CheckpointError(f"{path}: claims a header of {length} bytes in a file of {size} bytes; {_REMEDY}")
    header = parse_json_object(file.read(length), path)
    header.pop("__metadata__", None)
    entries = [_entry(name, value, path, 8 + length) for name, value in header.items()]
    end = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.info.num_bytes)):
        if entry.offset != end:
            kind = "overlaps another tensor" if entry.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {entry.info.name[:200]!r} {kind}; {_REMEDY}")
        end += entry.info.num_bytes
        if end > size:
            raise CheckpointError(
                f"{path}: tensor {entry.info.name[:200]!r} ends at byte {end} of a file of {size} bytes; {_REMEDY}"
            )
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes follow the last tensor; {_REMEDY}")
    return entries


def _entry(name: str, value: Any, path: Path, data_start: int) -> _Entry:
    """Check one tensor's JSON record on its own."""
    where = f"{path}: tensor {name[:200]!r}"
    record = value if isinstance(value, dict) else {}
    type_name, shape, offsets = record.get("dtype"), record.get("shape"), record.get("data_offsets")
    dtype = _DTYPES.get(type_name) if isinstance(type_name, str) else None
    if dtype is None or not isinstance(type_name, str):
        raise CheckpointError(
            f"{where} has unsupported dtype {str(type_name)[:200]!r}; save the model in one of {', '.join(_DTYPES)}"
        )
    if not _is_sizes(shape, _MAX_DIMS) or not _is_sizes(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has shape {str(shape)[:200]} and data_offsets {str(offsets)[:200]}, not lists of sizes; {_REMEDY}"
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(
            f"{where} of shape {tuple(shape)} and dtype {type_name} needs {num_bytes} bytes and is given "
            f"{offsets[1] - offsets[0]}; {_REMEDY}"
        )
    return _Entry(TensorInfo(name, tuple(shape), type_name, num_bytes), path, data_start + offsets[0])


def _is_sizes(value: Any, max_count: int) -> TypeGuard[list[int]]:
    """Whether JSON gave a short list of integers that fit 64 bits; longer ones would be slow to print."""
    if not isinstance(value, list) or len(value) > max_count:
        return False
    return all(type(item) is int and 0 <= item < 1 << 63 for item in value)
