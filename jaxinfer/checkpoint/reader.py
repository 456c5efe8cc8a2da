"""One interface over every checkpoint format: files in, named arrays out. Nothing here knows a model.

Bytes are read with `pread` in chunks of a few megabytes rather than through a memory map: mapped pages would count
towards the peak resident memory of loading, and a file that shrinks while it is mapped kills the process.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

CHUNK_BYTES = 1 << 20
"""Bytes read and converted at a time: small enough to stay in a CPU's cache between the passes over it."""

MAX_JSON_BYTES = 100 << 20
"""Largest JSON text accepted, which is also the safetensors format's own limit for its header."""

_ALIGNMENT_BYTES = 64  # what XLA's CPU client needs to use a NumPy buffer as it is

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_SIXTEEN_BIT_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}
_EXTENDED_FLOATS = frozenset(
    np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, the tensor where there is one, and a remedy."""


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says of one tensor.

    `shape` is row-major, so a linear layer is [out, in] in every format. `dtype` is the file's own name for the
    element type ("BF16", "F32", "Q4_1" …). `num_bytes` is the size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Checkpoint(ABC):
    """An open checkpoint.

    `format` is "gguf" or "safetensors". `config` is a Hugging Face folder's `config.json`, or a GGUF file's
    metadata with its arrays as lists. `generation_config` is empty where the checkpoint has none.
    """

    path: Path
    format: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @abstractmethod
    def close(self) -> None:
        """Close the files; reading afterwards raises `CheckpointError`. Closing twice is harmless."""

    @abstractmethod
    def _file_of(self, name: str) -> Path:
        """The file that holds the tensor, for messages."""

    @abstractmethod
    def _dtype_of(self, name: str) -> np.dtype:
        """The dtype of the arrays that `_chunks` yields."""

    @abstractmethod
    def _chunks(self, name: str) -> Iterator[np.ndarray]:
        """The tensor's elements in row-major order as flat arrays, which are valid until the next one."""

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Read one tensor, into `out` where it is given, converting to its dtype chunk by chunk.

        Without `out` the result has the file's dtype (bfloat16 through ml_dtypes), or float32 where the file holds
        quantized blocks. Beyond the result, a few `CHUNK_BYTES` are allocated.

        Raises:
            CheckpointError: no such tensor, `out` of another shape or kind, a short read, or values that are NaN or
                infinite in the file or in `out`'s dtype.
        """
        info = self._info(name)
        file, dtype = self._file_of(name), self._dtype_of(name)
        if out is None:
            out = np.empty(info.shape, dtype)
        if out.shape != info.shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {info.shape} and cannot be read into an array of shape "
                f"{out.shape}; check that the model configuration belongs to this checkpoint"
            )
        if out.dtype != dtype and not (is_floating(dtype) and is_floating(out.dtype)):
            raise CheckpointError(
                f"{file}: tensor {name!r} holds {dtype} and cannot be read as {out.dtype}; read it in its own dtype"
            )
        # A flat iterator assigns to a strided view in place, where reshape would silently fill a copy.
        flat = out.reshape(-1) if out.flags.c_contiguous else out.flat
        start = 0
        for chunk in self._chunks(name):
            stop = start + chunk.size
            with np.errstate(over="ignore", invalid="ignore"):
                flat[start:stop] = chunk
            if is_floating(dtype) and not all_finite(flat[start:stop]):
                _raise_not_finite(file, name, chunk, out.dtype, start)
            start = stop
        return out

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            examples = ", ".join(list(self.tensors)[:3])
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r} among its {len(self.tensors)} ({examples} …); "
                "check that the checkpoint is complete and of the expected architecture"
            )
        return self.tensors[name]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, num_tensors={len(self.tensors)})"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a GGUF file, a safetensors file, or a Hugging Face folder of safetensors, told apart by content.

    Raises:
        CheckpointError: the path is missing, of another format, or malformed.
    """
    from jaxinfer.checkpoint.gguf import GGUFCheckpoint
    from jaxinfer.checkpoint.safetensors_folder import SafetensorsCheckpoint

    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file or folder; check the path")
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path.parent, weights=path)
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix != ".gguf" and (magic[:2] == b"PK" or magic[:1] == b"\x80"):
        raise pickle_refused(path)
    return GGUFCheckpoint(path)


def pickle_refused(path: Path) -> CheckpointError:
    """The error for weights in Python's pickle format, which can run any code when they are loaded."""
    return CheckpointError(
        f"{path}: pickled PyTorch weights can run code when loaded and are refused; convert them to safetensors "
        "(load in transformers, then save_pretrained(..., safe_serialization=True))"
    )


def read_exact(file: IO[bytes], offset: int, view: memoryview, path: Path, name: str) -> None:
    """Fill a writable byte view from `offset`, raising `CheckpointError` where the file ends first."""
    if file.closed:
        raise CheckpointError(f"{path}: the checkpoint is closed; read tensor {name!r} before close()")
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path}: the file ends inside tensor {name!r}; download it again")
        done += count


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file of bounded size, raising `CheckpointError` for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes of JSON is more than the {MAX_JSON_BYTES} allowed")
        return parse_json_object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check that the folder is complete") from None


def parse_json_object(text: bytes, path: Path) -> dict[str, Any]:
    """Parse JSON bytes into a dict, refusing repeated keys and raising only `CheckpointError`."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{path}: the JSON text names {key[:200]!r} twice; write the file again")
            found[key] = value
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({str(error)[:200]}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the JSON text must be an object, not {type(value).__name__}")
    return value


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that `jax.device_put` uses in place on a CPU, where it would copy a misaligned one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is a NumPy float or one of the extended floats of ml_dtypes."""
    return dtype.kind == "f" or dtype in _EXTENDED_FLOATS


def all_finite(array: np.ndarray) -> bool:
    """Whether no element is NaN or infinite. 16-bit floats are tested by their exponent bits, which is faster."""
    exponent = _SIXTEEN_BIT_EXPONENTS.get(array.dtype)
    if exponent is None:
        return bool(np.isfinite(array).all())
    bits = array.view(np.uint16) & np.uint16(exponent)
    return not bool((bits == exponent).any())


def _raise_not_finite(file: Path, name: str, chunk: np.ndarray, dtype: np.dtype, start: int) -> None:
    """Tell a damaged value from one that only the target dtype cannot hold."""
    bad = np.flatnonzero(~np.isfinite(chunk))
    if bad.size:
        raise CheckpointError(
            f"{file}: tensor {name!r} holds {chunk[bad[0]]} at flat index {start + int(bad[0])}; "
            "the checkpoint is damaged, download it again"
        )
    largest = float(np.abs(chunk.astype(np.float64)).max())
    raise CheckpointError(
        f"{file}: tensor {name!r} holds values up to {largest:g}, beyond the range of {dtype}; "
        "load it with dtype='float32' or dtype='bfloat16'"
    )
