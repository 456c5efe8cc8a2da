"""The step as L calls of one compiled layer, for CPUs.

Under `lax.scan` XLA's CPU backend copies each layer's weights out of the stack before it multiplies with them, which
costs more than reading them; called with a layer's own arrays it reads them in place. These arrays are views of the
stack's memory, so nothing is held twice. The host dispatches a layer while the device works on the ones before
(docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.cache.paged_kv import PagedKVCache
from jaxinfer.engine.steps import StepInputs, attention_inputs, known_tokens
from jaxinfer.models.decoder import Decoder


def supports(model: Any) -> bool:
    """Whether a module is a `Decoder` that runs its layers as `Decoder` does."""
    return type(model).__call__ is Decoder.__call__


@dataclass(frozen=True)
class LayerwiseWeights:
    """The parameters as a flat tuple, and what each layer is called with: its own arrays, its index, its window."""

    leaves: tuple[Any, ...]
    layers: tuple[tuple[tuple[Any, ...], Any, Any], ...]


def split_weights(graphdef: Any, params: Any) -> LayerwiseWeights:
    """Views of each layer in the stacked parameters. On a CPU they share the stack's memory.

    Of parameters that are shapes, the shapes of a layer's, as often as there are layers.
    """
    model = nnx.merge(graphdef, params)
    shapes = jax.tree.leaves(nnx.split(model.layers)[1])
    if isinstance(shapes[0], jax.ShapeDtypeStruct):
        one = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in shapes), np.int32(0), np.int32(0)
        return LayerwiseWeights(tuple(jax.tree.leaves(params)), (one,) * len(model.config.windows))
    # A NumPy view of a JAX array on a CPU is its memory, and `device_put` takes aligned memory as it is.
    stack = [np.asarray(leaf) for leaf in shapes]
    layers = [
        (tuple(leaf[index] for leaf in stack), np.int32(index), np.int32(window))
        for index, window in enumerate(model.config.windows)
    ]
    return LayerwiseWeights(tuple(jax.tree.leaves(params)), tuple(jax.device_put(layers)))


@dataclass(frozen=True)
class LayerwiseProgram:
    """The compiled parts of a step, called like a step that is one program. Each is a jax `Compiled`."""

    begin: Any
    layer: Any
    end: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.begin, self.layer, self.end

    def __call__(self, weights: LayerwiseWeights, cache: PagedKVCache, inputs: StepInputs) -> tuple[Any, ...]:
        x, shared = self.begin(weights.leaves, inputs)
        for layer in weights.layers:
            x, cache = self.layer(layer, x, cache, shared)
        hidden, logits = self.end(weights.leaves, x, inputs.logit_rows)
        return hidden, logits, cache


def compile_layerwise(
    graphdef: Any,
    treedef: Any,
    weights: LayerwiseWeights,
    cache: PagedKVCache,
    inputs: StepInputs,
    *,
    tile_queries: int,
) -> dict[str, Any]:
    """The parts of a `LayerwiseProgram` for the shapes of `inputs`; arguments as of `compile_forward`.

    A layer's call donates the cache and the residual stream.
    """
    page_size = cache.page_size
    layer_def, stack = nnx.split(nnx.merge(graphdef, jax.tree.unflatten(treedef, weights.leaves)).layers)
    layer_tree = jax.tree.structure(stack)

    def begin(leaves, inputs):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        attention = attention_inputs(inputs, page_size, tile_queries)
        return model.embed_tokens(known_tokens(inputs)), (attention, model.rotation(attention.positions))

    def layer(own, x, cache, shared):
        leaves, index, window = own
        module = nnx.merge(layer_def, jax.tree.unflatten(layer_tree, leaves))
        return module(x, cache, *shared, index, window)

    def end(leaves, x, logit_rows):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden = model.norm(x)
        return hidden, model.logits(hidden[logit_rows]).astype(jnp.float32)

    first = jax.jit(begin).lower(weights.leaves, inputs)
    x, shared = first.out_info
    middle = jax.jit(layer, donate_argnums=(1, 2)).lower(weights.layers[0], x, cache, shared)
    last = jax.jit(end).lower(weights.leaves, x, inputs.logit_rows)
    return {"begin": first.compile(), "layer": middle.compile(), "end": last.compile()}
