"""From a file to a model's parameters: tensors stream from the checkpoint into the arrays the steps use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import KeyPath

from jaxinfer.checkpoint.config_json import model_config_from_json
from jaxinfer.checkpoint.orbax import MANIFEST_NAME, is_native_checkpoint, read_manifest, restore_params
from jaxinfer.checkpoint.reader import Checkpoint, CheckpointError, aligned_empty, open_checkpoint, read_json
from jaxinfer.checkpoint.validate import check_tensors
from jaxinfer.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import check_architecture, family_of_gguf, family_of_hf
from jaxinfer.models.weights import Piece

_NUM_READERS = 2
"""Threads that read and convert tensors. NumPy lets go of the interpreter's lock, and with two, memory is the limit."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be stepped: `nnx.merge(graphdef, params)` is the module.

    `generation_config` is what its checkpoint recommends for sampling, as `generation_config.json` has it.
    """

    config: ModelConfig
    graphdef: Any
    params: Any
    generation_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSource:
    """A model whose parameters have not been read: what is known before, and how to read them.

    `shapes` has the structure of the parameters, of which `held_bytes` are in memory already. `read` gives the
    parameters, once; `close` lets go of the files, read or not. `gguf_metadata` is a GGUF file's, to make its tokenizer
    of without parsing it again.
    """

    config: ModelConfig
    graphdef: Any
    shapes: Any
    read: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    held_bytes: int = 0
    gguf_metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes))


def load_model(path: Path, dtype: str) -> LoadedModel:
    """Read a GGUF file, a Hugging Face folder or a native checkpoint into parameters of `dtype`.

    Two tensors are in flight at a time, and on a CPU the arrays filled on the host are the parameters themselves, so
    the peak is the parameters' size and two tensors more.

    Raises:
        CheckpointError: the file is damaged, its architecture is unknown, or its tensors do not fit the architecture.
    """
    source = open_source(path, dtype)
    try:
        return LoadedModel(source.config, source.graphdef, source.read(), source.generation_config)
    finally:
        source.close()


def open_source(path: Path, dtype: str) -> ModelSource:
    """The first half of `load_model`: everything but the parameters. `read` raises what is found in their values."""
    if is_native_checkpoint(path):
        return _native_source(path, dtype)
    checkpoint = open_checkpoint(path)
    try:
        return _checkpoint_source(checkpoint, path, dtype)
    except BaseException:
        checkpoint.close()
        raise


def _checkpoint_source(checkpoint: Checkpoint, path: Path, dtype: str) -> ModelSource:
    try:
        family, config = _configure(checkpoint)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    pieces = family.pieces(config, checkpoint.format)
    ignorable = list(family.IGNORABLE)
    if config.tie_embeddings:
        ignorable.append(r"lm_head\.weight")
    check_tensors(checkpoint.tensors, {piece.name: piece.shape for piece in pieces}, ignorable, path)
    graphdef, abstract = abstract_model(config, dtype)
    read = partial(_read_params, checkpoint, pieces, abstract)
    return ModelSource(
        config,
        graphdef,
        abstract,
        read,
        checkpoint.close,
        checkpoint.generation_config,
        gguf_metadata=checkpoint.config if checkpoint.format == "gguf" else {},
    )


def _read_params(checkpoint: Checkpoint, pieces: Sequence[Piece], abstract: Any) -> Any:
    by_leaf = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf].append(piece)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    filled = []
    with ThreadPoolExecutor(_NUM_READERS, "jaxinfer-read") as pool:
        for key_path, leaf in leaves:
            array = aligned_empty(leaf.shape, leaf.dtype)
            # Whatever ends the loop early drops the pieces that have not begun.
            for _ in pool.map(partial(_fill, array, checkpoint=checkpoint), by_leaf[leaf_path(key_path)]):
                pass
            filled.append(jax.device_put(array))
    return jax.tree.unflatten(treedef, filled)


def _fill(array: np.ndarray, piece: Piece, checkpoint: Checkpoint) -> None:
    """Read a tensor into its part of a leaf's array: in place where that part is one run of memory."""
    view = piece.view(array)
    if view.flags.c_contiguous and view.shape == piece.shape and not piece.unpermute_head_dim:
        checkpoint.read(piece.name, view)
    else:
        piece.put(array, checkpoint.read(piece.name, np.empty(piece.shape, array.dtype)))


def _native_source(path: Path, dtype: str) -> ModelSource:
    manifest = read_manifest(path)
    try:
        config = model_config_from_json(manifest.config)
        check_architecture(config.architecture)
        graphdef, abstract = abstract_model(config, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path / MANIFEST_NAME}: {error}; convert the source checkpoint again") from error
    generation = path / "generation_config.json"
    recommended = read_json(generation) if generation.is_file() else {}

    def read() -> Any:
        restored = restore_params(path, named_leaves(abstract))
        return jax.tree.unflatten(jax.tree.structure(abstract), restored.values())

    return ModelSource(config, graphdef, abstract, read, generation_config=recommended)


def named_leaves(params: Any) -> dict[str, Any]:
    """A model's parameters, or their abstract shapes, in the tree's order: "layers/attention/qkv/weight" and so on."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(leaf_path(key_path)): leaf for key_path, leaf in leaves}


def auto_dtype() -> str:
    """What `dtype="auto"` means here: float32 on CPUs, float16 on GPUs before sm_80, bfloat16 elsewhere."""
    if jax.default_backend() == "cpu":
        return "float32"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return "float16" if capability is not None and float(capability) < 8.0 else "bfloat16"


def _configure(checkpoint: Checkpoint) -> tuple[Any, ModelConfig]:
    if checkpoint.format == "gguf":
        family = family_of_gguf(checkpoint.config)
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        config = family.config_from_gguf(checkpoint.config, shapes)
        if "rope_freqs.weight" in checkpoint.tensors:
            config = replace(config, rope_scaling=family.rope_divisors(checkpoint.read("rope_freqs.weight")))
        return family, config
    family = family_of_hf(checkpoint.config)
    return family, family.config_from_hf(checkpoint.config)


def abstract_model(config: ModelConfig, dtype: str) -> tuple[Any, Any]:
    """The module's structure and the shapes of its parameters, with no array allocated."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))


def leaf_path(key_path: KeyPath) -> tuple[str, ...]:
    """The names on the way to a parameter, in a module's state or in plain dicts: ("layers", "attention", "qkv" …)."""
    names = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in key_path]
    return tuple(str(name) for name in names if name not in (None, "value"))
