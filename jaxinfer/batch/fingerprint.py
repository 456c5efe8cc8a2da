"""What a job's results follow from besides its prompts, so that a job that goes on gives what it would have given."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.processors import LogitsProcessor
    from jaxinfer.tokenizer import Tokenizer

PIECE_BYTES = 64 << 20
"""Of parameters on an accelerator: how much each thread that hashes them has on the host at a time."""
_NUM_THREADS = 2
_PACKAGES = ("tokenizers", "llguidance", "jinja2")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_SHOWN_CHARACTERS = 60
_DIGEST_CHARACTERS = 64


class ChangedError(ValueError):
    """A job that was begun under another fingerprint. `changes` are in words."""

    def __init__(self, changes: Sequence[str], only_environment: bool):
        self.changes = list(changes)
        remedy = (
            "or accept that with --accept-changes: the results that are still to come then carry another fingerprint"
            if only_environment
            else "--accept-changes is for changes of the machine and its software alone"
        )
        told = "".join(f"\n  {change}" for change in changes)
        super().__init__(
            f"this job was begun under other circumstances, so that its results would not be of one kind:{told}\n"
            f"Go on with what it was; or begin a new job with another --output and --state; {remedy}."
        )


@dataclass(frozen=True)
class Fingerprint:
    """Of a job: its settings, as JSON has them; the model; and the machine with its software."""

    settings: Mapping[str, Any]
    model: Mapping[str, str]
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, json.loads(_canonical(value)))  # as it comes back from a file

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return hashlib.sha256(_canonical(self.as_json()).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, which `from_json` takes back."""
        return {"settings": self.settings, "model": self.model, "environment": self.environment}

    @classmethod
    def from_json(cls, found: Any) -> Fingerprint:
        """Raises `ValueError` for what `as_json` cannot have given."""
        names = {"settings", "model", "environment"}
        parts = found if isinstance(found, dict) and set(found) == names else {}
        if not parts or not all(isinstance(part, dict) for part in parts.values()):
            raise ValueError(f"this is no fingerprint: {_canonical(found)[:_SHOWN_CHARACTERS]}")
        return cls(**parts)


def fingerprint_of(llm: LLM, settings: Mapping[str, Any]) -> Fingerprint:
    """Of a job with these settings. Raises `TypeError` for settings that JSON does not have."""
    return Fingerprint(settings, model_identity(llm), job_environment())


def changes(old: Fingerprint, new: Fingerprint) -> list[str]:
    """What is different, in words: "jax: 0.10.2 then, 0.12.0 now"."""
    found = []
    for then, now in ((_flat(old.as_json()[part]), _flat(new.as_json()[part])) for part in old.as_json()):
        names = [name for name in {**then, **now} if _canonical(then.get(name)) != _canonical(now.get(name))]
        found += [_told(name, then.get(name), now.get(name)) for name in names]
    return list(dict.fromkeys(found))  # a setting may show in the model too


def check_unchanged(old: Fingerprint, new: Fingerprint, accept_changes: bool = False) -> list[str]:
    """Compare the fingerprint that a job was begun under with its own now; returns the changes that are accepted.

    Raises:
        ChangedError: it has changed, and that is not accepted: settings and model may not change at all.
    """
    found = changes(old, new)
    only_environment = (old.settings, old.model) == (new.settings, new.model)
    if found and not (accept_changes and only_environment):
        raise ChangedError(found, only_environment)
    return found


def job_environment() -> dict[str, str]:
    """The versions, sources, flags and processor that a job's results follow from, by name."""
    import jax

    from jaxinfer.engine.environment import environment, version_of

    versions = {package: version_of(package) for package in _PACKAGES}
    return {**environment(), **versions, **{name: str(getattr(jax.config, name)) for name in _JAX_SETTINGS}}


def model_identity(llm: LLM) -> dict[str, str]:
    """What the output of a request that brings its seed follows from in an LLM, by name.

    Values and not names of files, so that a checkpoint may be moved. Settings that change no bit are left out: those of
    the cache and the prefix cache, the overlap, and on CPUs the number of rows and tokens a step.
    """
    from jaxinfer.engine import assemble

    engine = llm.engine
    config, runner = engine.config, engine.runner
    found = {
        "parameters": parameters_digest(llm.params),
        **{f"config.{name}": _canonical(value) for name, value in asdict(config.model).items()},
        "tokenizer": _tokenizer_digest(llm.tokenizer),
        "chat template": _digest_of(dict(llm.tokenizer.spec.chat_templates)),
        "generation defaults": _canonical(llm.default_sampling_fields),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "attention": _attention_of(engine),
        "max_model_len": str(config.scheduler.max_model_len),
        "batch_invariant": str(config.batch_invariant),
        "logits processors": _canonical({each.name: _code_of(each) for each in engine.sampler.processors.values()}),
    }
    if not assemble.rows_keep_their_bits():
        found["shapes of steps"] = _canonical([asdict(bucket) for bucket in runner.buckets])
        found["page_size"] = str(config.cache.page_size)
    return found


def parameters_digest(params: Any) -> str:
    """SHA-256 over a model's parameters on the device: their names, dtypes, shapes and values.

    On a CPU nothing is copied; elsewhere `PIECE_BYTES` at a time come to the host.
    """
    from jaxinfer.engine.load import named_leaves

    def digest(named: tuple[str, Any]) -> bytes:
        name, leaf = named
        found = hashlib.sha256(f"{name}\0{leaf.dtype}\0{leaf.shape}\0".encode())
        for piece in _pieces(leaf):
            found.update(piece)
        return found.digest()

    with ThreadPoolExecutor(_NUM_THREADS, "jaxinfer-fingerprint") as pool:  # hashing lets go of Python's lock
        return hashlib.sha256(b"".join(pool.map(digest, named_leaves(params).items()))).hexdigest()


def _pieces(leaf: Any) -> Iterator[Any]:
    """The bytes of an array in C order, as one-dimensional uint8 arrays."""
    import jax
    import numpy as np

    if _on_host(leaf) or leaf.nbytes <= PIECE_BYTES:
        yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return
    num_rows = PIECE_BYTES * leaf.shape[0] // leaf.nbytes
    for start in range(0, leaf.shape[0], max(1, num_rows)):
        if num_rows:
            size = min(num_rows, leaf.shape[0] - start)
            yield from _pieces(jax.lax.dynamic_slice_in_dim(leaf, start, size))
        else:  # one row is more than a piece
            yield from _pieces(jax.lax.dynamic_index_in_dim(leaf, start, keepdims=False))


def _on_host(leaf: Any) -> bool:
    """Whether NumPy can look at an array where it is."""
    return [device.platform for device in leaf.devices()] == ["cpu"]


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    spec = asdict(tokenizer.spec)
    del spec["name"], spec["chat_templates"]  # a path; and told for itself
    sets = {name: sorted(value) for name, value in spec.items() if isinstance(value, frozenset)}
    spec = {**spec, **sets, "family": tokenizer.family.value, "vocab_size": tokenizer.vocab_size}
    return _digest_of([spec, tokenizer.backend.to_str()])


def _attention_of(engine: Engine) -> str:
    """The implementation of paged attention that the engine's steps have."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.engine.inputs import build
    from pallas_kernels.paged_attention import implementation_for

    runner, model = engine.runner, engine.config.model
    bucket, cache = runner.buckets[0], runner.cache
    inputs = build([], bucket, runner.table_width, runner.num_lanes)
    q = jax.ShapeDtypeStruct((bucket.num_tokens, model.num_heads, model.head_dim), jnp.dtype(engine.config.dtype))
    tables = inputs.page_table, inputs.query_start, inputs.context_lens
    return implementation_for(q, cache.k, cache.v, *tables, tile_queries=bucket.tile_queries)


def _code_of(processor: LogitsProcessor) -> dict[str, Any]:
    """A logits processor's parameters, and the digest of the file that it comes from, which may hold what it calls.

    Values that it closes over are not seen. Raises `ValueError` where there is no source.
    """
    code = inspect.unwrap(processor.fn)
    code = code if hasattr(code, "__qualname__") else type(code)
    path = getattr(sys.modules.get(code.__module__), "__file__", None)
    name = f"{code.__module__}.{code.__qualname__}"
    try:
        source = Path(path).read_bytes() if path else inspect.getsource(code).encode()
    except (OSError, TypeError):
        raise ValueError(
            f"logits processor {processor.name!r}: the source of {name} cannot be read, so that a change of it would "
            "not be seen; put it in a module"
        ) from None
    return {"params": dict(processor.params), "name": name, "source": hashlib.sha256(source).hexdigest()}


def _canonical(value: Any) -> str:
    """One JSON text for what JSON takes to be the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def _flat(part: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, `{"sampling.seed": …}`."""
    found = {}
    for name, value in part.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return found


def _told(name: str, then: Any, now: Any) -> str:
    """One change. Of long texts, as the features of a processor, only the words that differ are told."""
    if isinstance(then, str) and isinstance(now, str) and max(len(then), len(now)) > _SHOWN_CHARACTERS:
        words, others = then.split(), now.split()
        gone = " ".join(word for word in words if word not in others)
        come = " ".join(word for word in others if word not in words)
        then, now = (gone, come) if gone or come else (then, now)
    return f"{name}: {_short(then)} then, {_short(now)} now"


def _short(value: Any) -> str:
    if value is None or value == "":
        return "none"
    text = value if isinstance(value, str) else _canonical(value)
    if len(text) == _DIGEST_CHARACTERS and not set(text) - set("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
