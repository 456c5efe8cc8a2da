"""The native checkpoint format: parameters as they lie in memory, stored by Orbax beside a manifest.

    NAME/
      jaxinfer.json   model configuration, and every tensor's shape and dtype
      params/         an Orbax checkpoint of the flat dict of arrays
      tokenizer.json … files copied from the source

The manifest is compared with what the model expects before Orbax is asked for anything, so that a mismatch names its
tensor. Orbax and jax are imported when a function needs them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint.reader import CheckpointError, TensorInfo, read_json
from jaxinfer.checkpoint.validate import check_tensors

if TYPE_CHECKING:
    import jax

MANIFEST_NAME = "jaxinfer.json"
PARAMS_NAME = "params"
FORMAT_VERSION = 1

_GROUP_BYTES = 32 << 20
"""Tensors are restored in groups of about this size, since Orbax holds a call's staging copies all at once."""

_STORED_CHUNK_BYTES = 4 << 20
"""Arrays are stored in chunks of at most this size, since each chunk is read whole before it is copied."""


@dataclass(frozen=True)
class Manifest:
    """A native checkpoint's `jaxinfer.json`.

    `config` is the model's configuration as it was given to `save_checkpoint`. `dtype` is the parameters' common
    NumPy dtype name, or "mixed".
    """

    config: dict[str, Any]
    dtype: str
    tensors: dict[str, TensorInfo]


def is_native_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of this format."""
    return (path / MANIFEST_NAME).is_file()


def save_checkpoint(
    path: str | os.PathLike[str],
    params: Mapping[str, jax.Array],
    config: dict[str, Any],
    extra_files: Mapping[str, Path] | None = None,
) -> None:
    """Write a new checkpoint folder, which appears under its name only once it is complete.

    Args:
        path: the folder to create; its parents are created too.
        params: flat names to arrays, stored unchanged and uncompressed.
        config: the model's configuration; anything that JSON can hold.
        extra_files: files to copy into the folder (the tokenizer's), by the name each gets there.

    Raises:
        CheckpointError: the folder exists, `params` is empty, or an extra file is missing or has a reserved name.
    """
    path = Path(os.path.abspath(path))
    extra_files = extra_files or {}
    if path.exists():
        raise CheckpointError(f"{path}: exists already; delete it or choose another name")
    if not params:
        raise CheckpointError(f"{path}: there are no parameters to save")
    for name, source in extra_files.items():
        if name != Path(name).name or name in (MANIFEST_NAME, PARAMS_NAME):
            raise CheckpointError(f"{path}: {name!r} cannot name an extra file; give a plain, unreserved file name")
        if not Path(source).is_file():
            raise CheckpointError(f"{source}: the extra file {name!r} is not there; check its path")
    manifest = json.dumps(_manifest(params, config), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        _save_params(partial / PARAMS_NAME, params)
        for name, source in extra_files.items():
            shutil.copyfile(source, partial / name)
        (partial / MANIFEST_NAME).write_text(manifest, encoding="utf-8")
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, malformed, or of another format version.
    """
    file = Path(path) / MANIFEST_NAME
    data = read_json(file)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format version {version!r} is not {FORMAT_VERSION}; convert the source checkpoint again"
        )
    config, dtype, tensors = data.get("config"), data.get("dtype"), data.get("tensors")
    if not isinstance(config, dict) or not isinstance(dtype, str) or not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: lacks config, dtype or tensors; convert the source checkpoint again")
    return Manifest(config, dtype, {name: _tensor_info(file, name, value) for name, value in tensors.items()})


def restore_params(path: str | os.PathLike[str], target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restore parameters straight into their shardings.

    Args:
        path: the checkpoint folder.
        target: what each tensor must be; a struct without a sharding means the default device.

    Raises:
        CheckpointError: names, shapes or dtypes differ from the manifest's, or the stored arrays are damaged.
    """
    import jax
    import orbax.checkpoint as ocp

    path = Path(os.path.abspath(path))
    tensors = read_manifest(path).tensors
    check_tensors(tensors, {name: tuple(struct.shape) for name, struct in target.items()}, file=path)
    for name, struct in target.items():
        if tensors[name].dtype != struct.dtype.name:
            raise CheckpointError(
                f"{path}: tensor {name!r} is stored as {tensors[name].dtype} and {struct.dtype.name} is asked for; "
                f"load with dtype={tensors[name].dtype!r} or convert the source checkpoint again"
            )
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored: dict[str, jax.Array] = {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for names in _groups({name: tensors[name].num_bytes for name in target}):
                restore_args = {
                    name: ocp.ArrayRestoreArgs(
                        sharding=target[name].sharding or default, global_shape=tuple(target[name].shape)
                    )
                    for name in names
                }
                item = {name: target[name] for name in names}
                args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
                restored |= checkpointer.restore(path / PARAMS_NAME, args=args)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path / PARAMS_NAME}: cannot be restored ({str(error)[:300]}); convert the source checkpoint again"
        ) from error
    return {name: restored[name] for name in target}


def _groups(num_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Split names, in order, into runs of about `_GROUP_BYTES`."""
    group: list[str] = []
    total = 0
    for name, size in num_bytes.items():
        if group and total + size > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _save_params(path: Path, params: Mapping[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    save_args = {name: ocp.SaveArgs(chunk_byte_size=_STORED_CHUNK_BYTES) for name in params}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(params), save_args=save_args))


def _manifest(params: Mapping[str, jax.Array], config: dict[str, Any]) -> dict[str, Any]:
    dtypes = {array.dtype.name for array in params.values()}
    return {
        "format_version": FORMAT_VERSION,
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
