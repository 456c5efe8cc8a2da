"""The memory plan: what an engine will hold and how long its cache is, decided before any weight is read.

weights        known from the shapes of the parameters
temporaries    what the compiled programs say of themselves
sampler state  known from the vocabulary and the number of sequences
cache          whole pages, in what is left (docs/memory.md)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged_kv import page_bytes
from jaxinfer.config import EngineConfig
from jaxinfer.engine.buckets import Bucket, plan_buckets
from jaxinfer.engine.host_memory import available_host_bytes

CPU_POOL_BYTES = 4 * 10**9
"""Most that a CPU's cache takes unasked, unless one sequence needs more."""

_MIN_LEN = 2
_MAX_COMPILES = 3


class MemoryPlanError(ValueError):
    """A model and its settings need more memory than this process may use; nothing has been loaded."""


@dataclass(frozen=True)
class Footprint:
    """What compiled programs need beyond parameters and cache, in bytes."""

    temporaries_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine holds, in bytes. `num_pages` counts the null page.

    `available_bytes` is what the process could use when the plan was made, parameters it held already included; None
    where the system does not tell.
    """

    weights_bytes: int
    temporaries_bytes: int
    state_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    available_bytes: int | None

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.temporaries_bytes + self.state_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    def __str__(self) -> str:
        num_tokens = (self.num_pages - 1) * self.page_size
        sequences = num_tokens / self.max_model_len
        rows = [
            ("weights", self.weights_bytes, ""),
            ("step temporaries", self.temporaries_bytes, ""),
            ("sampler state", self.state_bytes, ""),
            ("cache", self.cache_bytes, f"{num_tokens:,} tokens, {sequences:.1f} times max_model_len"),
            ("total", self.total_bytes, ""),
        ]
        if self.available_bytes is not None:
            rows.append(("available", self.available_bytes, ""))
        return "\n".join(f"{name:<17}{_size(count):>9}  {note}".rstrip() for name, count, note in rows)


def device_memory(utilization: float | int) -> int | None:
    """Bytes that this process may still take on the device; None where the system does not tell.

    An accelerator: `utilization` times what XLA manages there, less what is in use. A CPU: `utilization` times what the
    system and the control groups leave to this process, so that something is left to others.
    """
    if jax.default_backend() == "cpu":
        free = available_host_bytes()
        return None if free is None else int(utilization * free)
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return max(0, int(utilization * stats["bytes_limit"]) - stats.get("bytes_in_use", 0))


def plan_memory(
    config: EngineConfig,
    weights_bytes: int,
    measure: Callable[[EngineConfig], Footprint],
    *,
    available_bytes: int | None,
    cache_cap_bytes: int | None = None,
) -> tuple[MemoryPlan, EngineConfig]:
    """Decide `num_pages`, and `max_model_len` where `config.fit_max_model_len` says so.

    The pool gets `config.cache.num_pages`, or as many pages as max_num_seqs sequences of max_model_len need, if the
    memory and `cache_cap_bytes` allow; one such sequence must fit, cap or not.

    The pool's size is in the programs' shapes, and what the programs need decides the pool's size. So they are compiled
    with the pages that a rough guess of their temporaries leaves, and the engine goes on to use them. Only where memory
    is tight and the guess was too low, or wastes more than 5% of the pool, are they compiled anew.

    Args:
        measure: compiles the largest programs of a configuration whose `num_pages` and `max_model_len` are final.
        available_bytes: for everything, parameters that are in memory already included; None is unlimited.

    Returns:
        The plan, and the configuration with the numbers in it that the last call of `measure` had.

    Raises:
        MemoryPlanError: it does not fit; the message has the numbers and the nearest settings that do.
    """
    fitter = _Fitter(config, weights_bytes, available_bytes, cache_cap_bytes)
    footprint = Footprint(_guess_temporaries(config), _guess_state(config))
    fitted = fitter.fit(footprint) or fitter.least()
    for attempt in range(_MAX_COMPILES):
        footprint = measure(fitted)
        plan = fitter.plan(fitted, footprint)
        better = fitter.fit(footprint)
        if better is None or attempt == _MAX_COMPILES - 1:
            break
        if plan.fits and fitter.plan(better, footprint).num_pages <= 1.05 * plan.num_pages:
            break
        fitted = better
    if plan.fits:
        return plan, fitted
    raise MemoryPlanError(_explain(config, fitter, plan, footprint, measure))


@dataclass(frozen=True)
class _Fitter:
    """Arithmetic of pages and lengths for one configuration and one amount of memory."""

    config: EngineConfig
    weights_bytes: int
    available_bytes: int | None
    cache_cap_bytes: int | None

    @property
    def page_bytes(self) -> int:
        shape, page_size = self.config.model, self.config.cache.page_size
        return page_bytes(shape.num_layers, shape.num_kv_heads, page_size, shape.head_dim, self.config.kv_dtype)

    def pages_of(self, max_model_len: int) -> int:
        """Pages of one sequence."""
        return -(-max_model_len // self.config.cache.page_size)

    def free_pages(self, footprint: Footprint) -> int | None:
        """Pages that fit beside all the rest, less the null page: below 1 where there is no room; None is unlimited."""
        if self.available_bytes is None:
            return None
        rest = self.weights_bytes + footprint.temporaries_bytes + footprint.state_bytes
        return (self.available_bytes - rest) // self.page_bytes - 1

    def longest(self, footprint: Footprint) -> int:
        """The largest max_model_len that fits, at most the configuration's; below 2 where none does."""
        limit, given = self.config.scheduler.max_model_len, self.config.cache.num_pages
        free = self.free_pages(footprint)
        if given is not None:
            if free is not None and free < given - 1:
                return 0
            free = given - 1 if self.config.fit_max_model_len else None
        return limit if free is None else min(limit, free * self.config.cache.page_size)

    def fit(self, footprint: Footprint) -> EngineConfig | None:
        """The configuration with its pages and length decided; None where it does not fit."""
        length, free = self.config.scheduler.max_model_len, self.free_pages(footprint)
        given, page_size = self.config.cache.num_pages, self.config.cache.page_size
        if self.config.fit_max_model_len:
            limit, length = length, self.longest(footprint)
            if length < _MIN_LEN:
                return None
            if given is None and length < limit:
                length = _steady(length // page_size) * page_size
        needed = self.pages_of(length)
        wanted = self.config.scheduler.max_num_seqs * needed
        if given is not None:
            needed = wanted = given - 1
        elif self.cache_cap_bytes is not None:
            wanted = max(needed, min(wanted, self.cache_cap_bytes // self.page_bytes))
        if free is not None and free < needed:
            return None
        if free is not None and free < wanted:
            wanted = max(needed, _steady(free))
        return self._with(length, wanted)

    def least(self) -> EngineConfig:
        """The configuration with the least cache that it allows, whether it fits or not."""
        return self.of_length(_MIN_LEN if self.config.fit_max_model_len else self.config.scheduler.max_model_len)

    def of_length(self, max_model_len: int) -> EngineConfig:
        """The configuration with the least cache for a length."""
        given = self.config.cache.num_pages
        return self._with(max_model_len, self.pages_of(max_model_len) if given is None else given - 1)

    def plan(self, fitted: EngineConfig, footprint: Footprint) -> MemoryPlan:
        assert fitted.cache.num_pages is not None
        return MemoryPlan(
            weights_bytes=self.weights_bytes,
            temporaries_bytes=footprint.temporaries_bytes,
            state_bytes=footprint.state_bytes,
            page_bytes=self.page_bytes,
            page_size=fitted.cache.page_size,
            num_pages=fitted.cache.num_pages,
            max_model_len=fitted.scheduler.max_model_len,
            available_bytes=self.available_bytes,
        )

    def _with(self, max_model_len: int, pages: int) -> EngineConfig:
        return replace(
            self.config,
            cache=replace(self.config.cache, num_pages=pages + 1),
            scheduler=replace(self.config.scheduler, max_model_len=max_model_len),
            fit_max_model_len=False,
        )


def _explain(
    config: EngineConfig,
    fitter: _Fitter,
    plan: MemoryPlan,
    footprint: Footprint,
    measure: Callable[[EngineConfig], Footprint],
) -> str:
    available = plan.available_bytes or 0
    asked = f"max_model_len={'auto' if config.fit_max_model_len else plan.max_model_len}"
    pages = f"cache {_size(plan.cache_bytes)}"
    if config.cache.num_pages is None:
        pages += f" for one sequence of {asked}"
    else:
        pages += f" for num_pages={plan.num_pages}"
    return (
        f"not enough memory: weights {_size(plan.weights_bytes)} + step temporaries {_size(plan.temporaries_bytes)} + "
        f"sampler state {_size(plan.state_bytes)} + {pages} = {_size(plan.total_bytes)}, and {_size(available)} may be "
        f"used (gpu_memory_utilization={config.cache.gpu_memory_utilization}); "
        f"{_remedy(config, fitter, footprint, measure)}"
    )


def _remedy(
    config: EngineConfig, fitter: _Fitter, footprint: Footprint, measure: Callable[[EngineConfig], Footprint]
) -> str:
    """The nearest settings that fit, in words."""
    if config.cache.num_pages is not None and (free := fitter.free_pages(footprint) or 0) >= 1:
        return f"num_pages={free + 1} fits"
    if (length := _longest(fitter, footprint, measure)) >= _MIN_LEN:
        return f"max_model_len={length} fits, and max_model_len='auto' takes what fits"
    smaller = [replace(fitter, config=each) for each in _smaller_steps(config)]
    # Nothing between helps where the smallest does not.
    if smaller and _longest(smaller[-1], measure(smaller[-1].least()), measure) >= _MIN_LEN:
        for each in smaller:
            if (length := _longest(each, measure(each.least()), measure)) >= _MIN_LEN:
                limits = each.config.scheduler
                names = f"max_num_seqs={limits.max_num_seqs}, max_num_batched_tokens={limits.max_num_batched_tokens}"
                whole = config.fit_max_model_len or length == limits.max_model_len
                return f"{names} fit" if whole else f"{names} fit with max_model_len={length}"
    narrower = jnp.dtype(config.dtype).itemsize > 2 and fitter.weights_bytes // 2 < (fitter.available_bytes or 0)
    halved = "dtype='bfloat16' halves the weights; else " if narrower else ""
    return f"{halved}take a smaller model, or free memory"


def _longest(fitter: _Fitter, footprint: Footprint, measure: Callable[[EngineConfig], Footprint]) -> int:
    """The largest max_model_len that fits, by programs compiled for it; below 2 where none does."""
    length = fitter.longest(footprint)
    for _ in range(_MAX_COMPILES):
        checked = length if length < _MIN_LEN else fitter.longest(measure(fitter.of_length(length)))
        if checked >= length:
            break
        length = checked
    return length


def _smaller_steps(config: EngineConfig) -> list[EngineConfig]:
    """The configuration with ever smaller steps, halving their tokens and then their rows."""
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    smaller = []
    smallest = plan_buckets(1, 1)[0].num_tokens
    while tokens > smallest or rows > 1:
        tokens, rows = (max(smallest, tokens // 2), rows) if tokens > smallest else (tokens, rows // 2)
        rows = min(rows, tokens)
        scheduler = replace(config.scheduler, max_num_seqs=rows, max_num_batched_tokens=tokens)
        smaller.append(replace(config, scheduler=scheduler))
    return smaller


def _steady(pages: int) -> int:
    """At most 1/32 fewer pages, a number that stays the same where free memory differs a little.

    The number is in the programs' shapes: each new one would find nothing in the compile cache at the next start.
    """
    step = 1 << max(0, pages.bit_length() - 6)
    return pages // step * step


def _guess_temporaries(config: EngineConfig) -> int:
    """A rough, usually generous guess, in float32: a layer's activations, and the sampler's copies of the logits."""
    shape, bucket = config.model, _largest_bucket(config)
    attention = shape.num_heads * shape.head_dim
    activations = bucket.num_tokens * 4 * (shape.ffn_dim + shape.embed_dim + attention)
    return 4 * (activations + 8 * bucket.num_rows * shape.vocab_size)


def _guess_state(config: EngineConfig) -> int:
    return 5 * config.model.vocab_size * (config.scheduler.max_num_seqs + 1)


def _largest_bucket(config: EngineConfig) -> Bucket:
    limits = config.scheduler
    return plan_buckets(limits.max_num_batched_tokens, limits.max_num_seqs)[0]


def _size(num_bytes: int) -> str:
    """ "538.1 MB", decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}" if unit == "GB" else f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
