"""The operation `paged_attention` and the choice of its implementation."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference, xla

IMPLEMENTATIONS = {"xla": xla.paged_attention, "reference": reference.paged_attention}
"""In order of preference: the first that supports a call is taken unless one is named."""


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "L pages K page_size H"],
    v_pages: Float[Array, "L pages K page_size H"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B P"],
    query_start: Int[Array, " B1"],
    context_lens: Int[Array, " B"],
    *,
    scale: float | None = None,
    window: int | Int[Array, ""] = 0,
    softcap: float = 0.0,
    sinks: Float[Array, " N"] | None = None,
    tile_queries: int = 1,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of each row's last queries over the pages of that row, in one layer of the cache.

    Row b owns the tokens query_start[b] ... query_start[b + 1] - 1 of q, which are the last positions of its context;
    context_lens[b] counts them in. A row with no tokens, and tokens past query_start[-1], yield values of no meaning.

    Args:
        layer: which layer of the pool to read; the pool is never sliced, since that would copy a layer of it.
        page_table: pages of each row in order, 0 (the null page) past its end.
        scale: multiplies the scores; 1 / sqrt(H) when None.
        window: positions a query sees, itself included; 0 for all. May be data, so that layers can differ in a scan.
        softcap: scores become softcap * tanh(scores / softcap) where it is not 0.
        sinks: one logit a head that takes part in the softmax's denominator only.
        tile_queries: queries a tile holds, a choice of speed that changes no bit of the result.
        implementation: a name of `IMPLEMENTATIONS`; one that is named never falls back to another.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: the named implementation, or each of them, does not support this call.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    reasons = []
    for name in [implementation] if implementation else IMPLEMENTATIONS:
        try:
            return IMPLEMENTATIONS[name](
                q, k_pages, v_pages, layer, page_table, query_start.astype(jnp.int32), context_lens.astype(jnp.int32),
                scale=scale, window=window, softcap=softcap, sinks=sinks, tile_queries=tile_queries,
            )  # fmt: skip
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError("no implementation supports this call: " + "; ".join(reasons))


def implementation_for(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, query_start: Any, context_lens: Any, **settings: Any
) -> str:
    """The name of the implementation that `paged_attention` takes for a call of these shapes, where none is named.

    Arrays may be given as `jax.ShapeDtypeStruct`; nothing is computed.

    Raises:
        NotImplementedError: none supports this call.
    """
    arrays = q, k_pages, v_pages, np.int32(0), page_table, query_start, context_lens
    for name in IMPLEMENTATIONS:
        with suppress(NotImplementedError):
            jax.eval_shape(partial(paged_attention, implementation=name, **settings), *arrays)
            return name
    raise NotImplementedError("no implementation supports this call")
