"""The native checkpoint format: parameters as they lie in memory, stored by Orbax beside a manifest.

    NAME/
      jaxinfer.json   model configuration, source, and every tensor's shape and dtype
      params/         an Orbax checkpoint of the flat dict of arrays
      tokenizer.json … what the tokenizer is rebuilt from

The manifest is compared with what the model expects before any array is read, so that a mismatch names its tensor.
Orbax writes; arrays are read through TensorStore, on which Orbax stands, since Orbax's own restore fills a buffer of
the stored dtype, casts it, and has it copied once more where XLA finds it misaligned. Here a shard streams, cast on
the way, into the buffer that becomes the array. Orbax, TensorStore and jax are imported when a function needs them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.checkpoint.reader import (
    CHUNK_BYTES,
    CheckpointError,
    TensorInfo,
    aligned_empty,
    all_finite,
    is_floating,
    read_json,
)
from jaxinfer.checkpoint.validate import check_tensors

if TYPE_CHECKING:
    import jax

MANIFEST_NAME = "jaxinfer.json"
PARAMS_NAME = "params"
FORMAT_VERSION = 1

_REMEDY = "convert the source checkpoint again"
_STORED_CHUNK_BYTES = 4 << 20
"""Arrays are stored in chunks of at most this size, since each chunk is read whole before it is copied."""

_READ_BYTES = 16 << 20
"""Rows are read in runs of about this size, since the chunks of one TensorStore call can all be in memory at once."""


@dataclass(frozen=True)
class Manifest:
    """A native checkpoint's `jaxinfer.json`.

    `config` and `source` are what `save_checkpoint` was given. `dtype` is the parameters' common NumPy dtype name, or
    "mixed".
    """

    config: dict[str, Any]
    source: str
    dtype: str
    tensors: dict[str, TensorInfo]


def is_native_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of this format."""
    return (path / MANIFEST_NAME).is_file()


def check_destination(path: Path, overwrite: bool) -> None:
    """Raise `CheckpointError` where `save_checkpoint` would: something is there that may not be replaced."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise CheckpointError(f"{path}: exists already; delete it, choose another name, or ask to overwrite it")
    if path.is_symlink() or not is_native_checkpoint(path):
        raise CheckpointError(f"{path}: is not a converted checkpoint and is not overwritten; choose another name")


def save_checkpoint(
    path: str | os.PathLike[str],
    params: Mapping[str, jax.Array],
    config: dict[str, Any],
    extra_files: Mapping[str, Path | bytes] | None = None,
    *,
    source: str = "",
    overwrite: bool = False,
) -> None:
    """Write a checkpoint folder, which appears under its name only once it is complete.

    Args:
        path: the folder to create; its parents are created too.
        params: flat names to arrays, stored unchanged and uncompressed.
        config: the model's configuration; anything that JSON can hold.
        extra_files: files to copy into the folder, or their bytes (the tokenizer's), by the name each gets there.
        source: what the parameters were made from, for people.
        overwrite: replace a checkpoint of this format that is there.

    Raises:
        CheckpointError: the folder exists, `params` is empty, an extra file is missing or has a reserved name, the
            disk has no room, or writing fails.
    """
    path = Path(os.path.abspath(path))
    extra_files = extra_files or {}
    check_destination(path, overwrite)
    if not params:
        raise CheckpointError(f"{path}: there are no parameters to save")
    for name, content in extra_files.items():
        _check_extra_file(path, name, content)
    manifest = json.dumps(_manifest(params, config, source), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_space(path, sum(array.nbytes for array in params.values()))
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        _save_params(partial / PARAMS_NAME, params)
        for name, content in extra_files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        (partial / MANIFEST_NAME).write_text(manifest, encoding="utf-8")
        _move_into_place(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_extra_file(path: Path, name: str, content: Path | bytes) -> None:
    parts = Path(name).parts
    if not parts or parts[0] in (MANIFEST_NAME, PARAMS_NAME, "/", "..") or ".." in parts or len(parts) > 2:
        raise CheckpointError(f"{path}: {name!r} cannot name an extra file; give a plain, unreserved file name")
    if isinstance(content, Path) and not content.is_file():
        raise CheckpointError(f"{content}: the extra file {name!r} is not there; check its path")


def _check_space(path: Path, num_bytes: int) -> None:
    # Asked first, since Orbax reports a full disk with a page of tracebacks.
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"{path}: needs {num_bytes:,} bytes and the disk has {free_bytes:,} free; make room, or save elsewhere"
        )


def _move_into_place(partial: Path, path: Path) -> None:
    """Give a complete folder its name. An older one steps aside first, and comes back if the renaming fails."""
    if not path.exists():
        partial.rename(path)
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.rename(old)
    try:
        partial.rename(path)
    except BaseException:  # an interrupt between the two renames included
        old.rename(path)
        raise
    shutil.rmtree(old)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, malformed, or of another format version.
    """
    file = Path(path) / MANIFEST_NAME
    data = read_json(file)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{file}: format version {version!r} is not {FORMAT_VERSION}; {_REMEDY}")
    config, source, dtype, tensors = (data.get(key) for key in ("config", "source", "dtype", "tensors"))
    if not (
        isinstance(config, dict) and isinstance(source, str) and isinstance(dtype, str) and isinstance(tensors, dict)
    ):
        raise CheckpointError(f"{file}: lacks config, source, dtype or tensors; {_REMEDY}")
    return Manifest(config, source, dtype, {name: _tensor_info(file, name, value) for name, value in tensors.items()})


def restore_params(path: str | os.PathLike[str], target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restore parameters straight into their shardings, with no second copy on the host.

    Args:
        path: the checkpoint folder.
        target: what each tensor must be. Floating values are cast where the stored dtype is another; a struct without
            a sharding means the default device.

    Raises:
        CheckpointError: names or shapes differ from the manifest's, a dtype cannot be cast, or the stored arrays are
            damaged, hold NaN or infinity, or exceed the range of the dtype asked for.
    """
    import jax

    path = Path(os.path.abspath(path))
    tensors = read_manifest(path).tensors
    check_tensors(tensors, {name: tuple(struct.shape) for name, struct in target.items()}, file=path)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored: dict[str, jax.Array] = {}
    for name, struct in target.items():
        stored = _StoredArray(path, tensors[name], struct.dtype)
        restored[name] = jax.make_array_from_callback(tuple(struct.shape), struct.sharding or default, stored.read)
    return restored


class _StoredArray:
    """One array in the Orbax folder, read a shard at a time."""

    def __init__(self, path: Path, info: TensorInfo, dtype: np.dtype) -> None:
        self._path, self._name, self._dtype = path, info.name, np.dtype(dtype)
        self._array = self._open()
        stored = self._array.dtype.numpy_dtype
        if (self._array.shape, stored.name) != (info.shape, info.dtype):
            raise self._error(
                f"is stored as {stored.name} {self._array.shape}, not {info.dtype} {info.shape} as {MANIFEST_NAME} says"
            )
        if stored != self._dtype and not (is_floating(stored) and is_floating(self._dtype)):
            raise self._error(f"is stored as {stored.name} and cannot be cast to {self._dtype.name}")

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """The part of the array that `index` selects (None: all), in a buffer that XLA's CPU client takes as it is."""
        import tensorstore as ts

        part = ts.cast(self._array[index or ()], self._dtype)[ts.d[:].translate_to[0]]
        out = aligned_empty(tuple(part.shape), self._dtype)
        try:
            for rows in self._runs_of_rows(out):
                ts.array(out[rows]).write(part[rows][ts.d[:].translate_to[0]]).result()
        except Exception as error:  # TensorStore maps its statuses to many kinds
            raise self._error(f"cannot be restored ({str(error)[:300]})") from None
        flat = out.reshape(-1)
        step = CHUNK_BYTES // self._dtype.itemsize
        if is_floating(self._dtype) and not all(all_finite(flat[i : i + step]) for i in range(0, flat.size, step)):
            stored = self._array.dtype.numpy_dtype
            beyond = f", or values beyond the range of {self._dtype.name}: load it as {stored.name}"
            raise self._error(f"holds NaN or infinite values{beyond if stored != self._dtype else ''}")
        return out

    def _runs_of_rows(self, out: np.ndarray) -> Iterator[Any]:
        """Indices that together select all of `out`, each about `_READ_BYTES` and, in the file, whole chunks."""
        if out.ndim == 0 or out.size == 0:
            yield ...
            return
        chunk_rows = (self._array.chunk_layout.read_chunk.shape or (1,))[0]
        num_rows = max(1, _READ_BYTES // (out.nbytes // out.shape[0]) // chunk_rows) * chunk_rows
        yield from (slice(start, min(start + num_rows, len(out))) for start in range(0, len(out), num_rows))

    def _open(self) -> Any:
        import tensorstore as ts

        base = {"driver": "file", "path": f"{self._path / PARAMS_NAME}/"}
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{self._name}/"},
            # Orbax stores every chunk, so that one that is missing is a fault and not zeros.
            "fill_missing_data_reads": False,
        }
        try:
            return ts.open(spec, open=True, read=True).result()
        except Exception as error:  # as above
            raise self._error(f"cannot be restored ({str(error)[:300]})") from None

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path / PARAMS_NAME}: tensor {self._name!r} {what}; {_REMEDY}")


def _save_params(path: Path, params: Mapping[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    save_args = {
        # Stacked arrays [L, ...] are cut into layers first, so that chunks follow the order in memory.
        name: ocp.SaveArgs(chunk_byte_size=_STORED_CHUNK_BYTES, shard_axes=(0,) if array.ndim > 2 else ())
        for name, array in params.items()
    }
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(dict(params), save_args=save_args))
    except Exception as error:  # TensorStore maps its statuses to many kinds
        raise CheckpointError(f"{path}: cannot be written ({str(error)[:300]}); check the disk") from error
    # A note that names the temporary folder, of use only on object stores.
    (path / "commit_success.txt").unlink(missing_ok=True)


def _manifest(params: Mapping[str, jax.Array], config: dict[str, Any], source: str) -> dict[str, Any]:
    dtypes = {array.dtype.name for array in params.values()}
    return {
        "format_version": FORMAT_VERSION,
        "source": source,
        "config": config,
        "dtype": dtypes.pop() if len(dtypes) == 1 else "mixed",
        "tensors": {
            name: {"shape": list(array.shape), "dtype": array.dtype.name, "num_bytes": array.nbytes}
            for name, array in params.items()
        },
    }


def _tensor_info(file: Path, name: str, value: Any) -> TensorInfo:
    try:
        shape, dtype, num_bytes = tuple(value["shape"]), value["dtype"], value["num_bytes"]
        if all(type(item) is int and item >= 0 for item in (*shape, num_bytes)) and isinstance(dtype, str):
            return TensorInfo(name, shape, dtype, num_bytes)
    except (KeyError, TypeError):
        pass
    raise CheckpointError(f"{file}: tensor {name[:200]!r} lacks a shape, dtype or size; convert the checkpoint again")
