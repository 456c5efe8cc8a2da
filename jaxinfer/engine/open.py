"""From what a user names (a file, a folder, a hub id, a Flax module) to parameters and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.checkpoint.hub import resolve_model
from jaxinfer.config import DTYPES, ModelConfig
from jaxinfer.engine.load import ModelSource, auto_dtype, open_source
from jaxinfer.engine.runner import matching_params
from jaxinfer.tokenizer import Tokenizer, blank_tokenizer, load_tokenizer, tokenizer_from_gguf


@dataclass(frozen=True)
class OpenedModel:
    """A model, its tokenizer, the dtype it runs in, and one line that says where it came from.

    The end of a `with` block closes the model's files.
    """

    model: ModelSource
    tokenizer: Tokenizer
    dtype: str
    source: str

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.model.close()


def open_model(
    model: Any, *, params: Any = None, tokenizer: Any = None, revision: str | None, dtype: str
) -> OpenedModel:
    """Open a checkpoint, or take a module and its parameters. See `LLM` for the arguments.

    Raises:
        ValueError: an argument out of its range, or arguments that exclude each other.
        CheckpointError: a model that cannot be found or read.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype={dtype!r} must be auto, {', '.join(DTYPES)}")
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    tokenizer = os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer
    if not isinstance(tokenizer, str | Tokenizer | None):
        raise TypeError(f"tokenizer={tokenizer!r:.60} must be a path, a hub id or a jaxinfer Tokenizer")
    if model is not None and not isinstance(model, str):
        return _open_module(model, params, tokenizer, revision, dtype)
    if params is not None:
        raise ValueError("params go with a Flax module as model; a checkpoint brings its own")
    given = tokenizer if isinstance(tokenizer, str) else None
    resolved = resolve_model(model, revision=revision, tokenizer=given)
    dtype = auto_dtype() if dtype == "auto" else dtype
    source = open_source(resolved.path, dtype)
    try:
        if not isinstance(tokenizer, Tokenizer):
            if source.gguf_metadata and resolved.tokenizer == resolved.path:
                tokenizer = tokenizer_from_gguf(source.gguf_metadata, resolved.path.name)
            else:
                tokenizer = load_tokenizer(resolved.tokenizer)
    except BaseException:
        source.close()
        raise
    return OpenedModel(source, tokenizer, dtype, resolved.source)


def _open_module(
    module: Any, params: Any, tokenizer: str | Tokenizer | None, revision: str | None, dtype: str
) -> OpenedModel:
    name = type(module).__name__
    config = getattr(module, "config", None)
    if not isinstance(module, nnx.Module) or not isinstance(config, ModelConfig):
        raise ValueError(
            f"model={name} is no checkpoint's name and no flax.nnx.Module with a `config` of "
            "jaxinfer.config.ModelConfig, `__call__(tokens, cache, inputs)` and `logits(hidden)`: see "
            "jaxinfer.models.decoder.Decoder"
        )
    if revision is not None:
        raise ValueError(f"revision={revision!r} goes with a hub id, and model is a module")
    graphdef, own = nnx.split(module)
    placed = own if params is None else matching_params(own, params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(placed)):
        raise ValueError(f"model={name} has shapes and no values: pass params=")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(placed) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    # Norms may be kept in float32 beside narrower weights; the narrower is what the activations are in.
    own_dtype = next((name for name in reversed(DTYPES) if name in dtypes), "float32")
    if dtype not in ("auto", own_dtype):
        raise ValueError(f"dtype={dtype!r}: the module's parameters are {own_dtype}; convert them, or leave dtype out")
    if tokenizer is None:
        tokenizer = blank_tokenizer(config.vocab_size, config.eos_token_ids)
    elif isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(placed) if isinstance(leaf, jax.Array))
    source = ModelSource(config, graphdef, jax.tree.map(_shape_of, placed), lambda: placed, held_bytes=held)
    return OpenedModel(source, tokenizer, own_dtype, f"the module {name}")


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding if getattr(leaf, "committed", False) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def default_sampling_fields(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The `SamplingParams` fields that a model's `generation_config.json` recommends."""
    names = {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "typical_p": "typical_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
    found = {
        ours: generation_config[theirs] for theirs, ours in names.items() if generation_config.get(theirs) is not None
    }
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
