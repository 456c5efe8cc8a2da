"""Frozen configuration dataclasses. They compose; none inherits from another, and nothing here imports jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_TILE_TOKENS = 128
"""Keys that attention takes at a time, a whole number of pages (docs/performance.md)."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    kind: "linear" divides every frequency by `factor`; "llama3" divides the low frequencies only, with a smooth
    ramp between the two wavelength bounds (Llama 3.1); "frequencies" divides by one given factor a frequency
    (what a GGUF file's `rope_freqs.weight` holds).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model: what every layer, the cache and the planner need to know.

    `sliding_windows` has one entry a layer: the number of positions a query sees, itself included, or 0 for all.
    """

    architecture: str
    vocab_size: int
    embed_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim={self.head_dim} must be even for rotary embedding")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"model config: sliding_windows has {len(self.sliding_windows)} entries for {self.num_layers} layers"
            )

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer, 0 where it sees every position."""
        return self.sliding_windows or (0,) * self.num_layers


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `num_pages` counts the null page 0; None means that the planner chooses.

    `gpu_memory_utilization` is the share that an engine may fill of the memory that XLA manages on an accelerator, and
    on a CPU of the memory that is free for the process.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | int = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.page_size, 1) or ATTENTION_TILE_TOKENS % self.page_size:
            raise ValueError(
                f"page_size={self.page_size!r} must be a whole number that divides {ATTENTION_TILE_TOKENS}"
            )
        most = (2**31 - 1) // self.page_size  # slots are 32-bit numbers
        if self.num_pages is not None and (not _is_whole(self.num_pages, 2) or self.num_pages > most):
            raise ValueError(
                f"num_pages={self.num_pages!r:.60} must be a whole number from 2 (one is the null page) up to {most}"
            )
        if self.kv_cache_dtype not in ("auto", *DTYPES):
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} must be auto, {', '.join(DTYPES)}")
        share: Any = self.gpu_memory_utilization
        if not isinstance(share, float | int) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} must be above 0 and at most 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be True or False")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of one request, in tokens and rows; shares of the tenants, 1 where none is given."""

    max_model_len: int = 2048
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    tenant_weights: Mapping[str, float | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if not _is_whole(getattr(self, name), 1):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number from 1 up")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "and each running sequence takes a token of a step: raise the one or lower the other"
            )
        if not isinstance(self.tenant_weights, Mapping):
            raise ValueError(f"tenant_weights={self.tenant_weights!r:.60} must map tenants to numbers")
        for tenant, weight in self.tenant_weights.items():
            real = isinstance(weight, float | int) and not isinstance(weight, bool)
            if not isinstance(tenant, str) or not real or not 0.001 <= weight <= 1000:
                raise ValueError(f"tenant_weights[{tenant!r:.60}]={weight!r} must be a number from 0.001 up to 1000")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from.

    `batch_invariant`: a request's tokens and log-probabilities do not depend on the requests beside it, bit for bit.
    `overlap`: a step is dispatched before the host has read the one before.
    `fit_max_model_len`: `scheduler.max_model_len` is the most that is wanted; the memory plan may lower it.
    `compilation_cache`: where compiled programs are kept; see `LLM`.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dtype: str = "float32"
    seed: int = 0
    batch_invariant: bool = True
    overlap: bool = True
    fit_max_model_len: bool = False
    compilation_cache: Any = None  # str | PathLike | bool | None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap={self.overlap!r} must be True or False")

    @property
    def kv_dtype(self) -> str:
        """Of keys and values in the cache."""
        return self.dtype if self.cache.kv_cache_dtype == "auto" else self.cache.kv_cache_dtype


def check_seed(seed: Any) -> None:
    """Raise `ValueError` for what no engine's randomness can start from."""
    if not _is_whole(seed, 0):
        raise ValueError(f"seed={seed!r} must be a whole number from 0 up")


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
