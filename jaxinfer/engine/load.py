"""From a file to a model's parameters: tensors stream from the checkpoint into the arrays the steps use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import DictKey, KeyPath

from jaxinfer.checkpoint.reader import Checkpoint, CheckpointError, open_checkpoint
from jaxinfer.checkpoint.validate import check_finite, check_tensors
from jaxinfer.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import family_of_gguf, family_of_hf

_ALIGNMENT_BYTES = 64  # what XLA's CPU client needs to use a NumPy buffer as it is


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be stepped: `nnx.merge(graphdef, params)` is the module.

    `generation_config` is what its checkpoint recommends for sampling, as `generation_config.json` has it.
    """

    config: ModelConfig
    graphdef: Any
    params: Any
    generation_config: Mapping[str, Any] = field(default_factory=dict)


def load_model(path: Path, dtype: str) -> LoadedModel:
    """Read a GGUF file or a Hugging Face folder into parameters of `dtype`.

    One tensor is in flight at a time, and on a CPU the arrays filled on the host are the parameters themselves, so the
    peak is the parameters' size and one tensor more.

    Raises:
        CheckpointError: the file is damaged, its architecture is unknown, or its tensors do not fit the architecture.
    """
    with open_checkpoint(path) as checkpoint:
        try:
            family, config = _configure(checkpoint)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        pieces = family.pieces(config, checkpoint.format)
        ignorable = list(family.IGNORABLE)
        if config.tie_embeddings:
            ignorable.append(r"lm_head\.weight")
        check_tensors(checkpoint.tensors, {piece.name: piece.shape for piece in pieces}, ignorable, path)

        by_leaf = defaultdict(list)
        for piece in pieces:
            by_leaf[piece.leaf].append(piece)
        graphdef, abstract = abstract_model(config, dtype)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
        filled = []
        for key_path, leaf in leaves:
            array = _aligned_empty(leaf.shape, leaf.dtype)
            for piece in by_leaf[leaf_path(key_path)]:
                values = checkpoint.read(piece.name)
                check_finite(piece.name, values, path)
                piece.put(array, values)
            filled.append(jax.device_put(array))
        return LoadedModel(config, graphdef, jax.tree.unflatten(treedef, filled), checkpoint.generation_config)


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
    """The names on the way to a parameter: ("layers", "attention", "qkv", "weight")."""
    return tuple(str(key.key) for key in key_path if isinstance(key, DictKey))


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = jnp.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
