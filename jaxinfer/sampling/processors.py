"""User logits processors: pure device functions, named at `LLM(...)`, with float parameters per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ENABLED = "enabled"

ProcessorFn = Callable[[Array, Mapping[str, Array]], Array]


@dataclass(frozen=True)
class LogitsProcessor:
    """A function on the logits that requests may switch on by name.

    `fn(logits, params)` receives `logits` float32 [B, V] and `params`, one float32 [B] array for each name in
    `params`; it returns float32 [B, V]. It is traced once for each row count, so it must be a pure JAX function,
    and row b of its result may depend on row b alone: that is what keeps a request independent of its neighbours.
    `params` maps each parameter to the value that a request gets when it does not set it.

    Raises `ValueError` for an empty or reserved name and `TypeError` when `fn` cannot be called.
    """

    name: str
    fn: ProcessorFn
    params: Mapping[str, float | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("logits processor: name is empty; give it the name that requests will use")
        if not callable(self.fn):
            raise TypeError(f"logits processor {self.name!r}: fn={self.fn!r} is not callable")
        if ENABLED in self.params:
            raise ValueError(f"logits processor {self.name!r}: parameter {ENABLED!r} is reserved; rename it")
        # Hashable and fixed, so that a tuple of processors can be a static argument of a jitted step.
        object.__setattr__(self, "params", _FrozenParams({k: float(v) for k, v in self.params.items()}))

    def resolve(self, given: Mapping[str, float | int]) -> dict[str, float]:
        """A request's parameters with defaults filled in. Raises `ValueError` for a name that was not declared."""
        unknown = sorted(set(given) - set(self.params))
        if unknown:
            raise ValueError(
                f"logits processor {self.name!r} has no parameter {unknown[0]!r}; it takes {sorted(self.params)}"
            )
        return {**self.params, **{k: float(v) for k, v in given.items()}}


class _FrozenParams(dict[str, float]):
    """A dict that hashes by its items; filled once, in `LogitsProcessor`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def default_params(processors: Sequence[LogitsProcessor], num_rows: int) -> dict[str, dict[str, np.ndarray]]:
    """Host arrays for `SamplingInputs.processor_params`: every row disabled, every parameter at its default."""
    return {
        p.name: {
            ENABLED: np.zeros(num_rows, bool),
            **{name: np.full(num_rows, value, np.float32) for name, value in p.params.items()},
        }
        for p in processors
    }


def apply_processors(
    logits: Float[Array, "B V"],
    processor_params: Mapping[str, Mapping[str, Array]],
    processors: Sequence[LogitsProcessor],
) -> Float[Array, "B V"]:
    """Each processor in turn, on the rows that enabled it; other rows keep their logits bit for bit.

    Raises `ValueError` while tracing when `processor_params` does not name the same processors, or when a
    processor returns another shape.
    """
    if set(processor_params) != {p.name for p in processors}:
        raise ValueError(
            f"processor_params names {sorted(processor_params)}, but the step was built with "
            f"{sorted(p.name for p in processors)}"
        )
    for processor in processors:
        params = dict(processor_params[processor.name])
        enabled = params.pop(ENABLED)

        def run(x: Array, processor: LogitsProcessor = processor, params=params, enabled=enabled) -> Array:
            out = processor.fn(x, params)
            if out.shape != x.shape:
                raise ValueError(f"logits processor {processor.name!r} returned shape {out.shape} for logits {x.shape}")
            return jnp.where(enabled[:, None], out.astype(x.dtype), x)

        logits = jax.lax.cond(jnp.any(enabled), run, lambda x: x, logits)
    return logits
