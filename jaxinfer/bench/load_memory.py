"""How much host memory loading a model takes: `python -m jaxinfer.bench load-memory`."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from jaxinfer.bench.child import run_child, serve_child

LIMIT_FACTOR = 1.3
LIMIT_EXTRA_BYTES = 500_000_000

_STATUS = Path("/proc/self/status")


def measure_load_memory(model: str | None, dtype: str) -> dict[str, Any]:
    """Load a model in a fresh process and report the peak of its resident memory.

    Args:
        model: what `LLM(model=…)` takes.
        dtype: "auto" or one of `jaxinfer.config.DTYPES`.

    Returns:
        `model`, `kind` and `dtype` as they were resolved; `params_bytes`; `baseline_rss_bytes`, after the imports and
        the start of the backend; `peak_rss_bytes` above that baseline; `limit_bytes`, 1.3 times the parameters and
        500 MB; `within_limit`; `load_s`.

    Raises:
        ValueError: the model could not be loaded; the message is the loader's.
        RuntimeError: the process failed otherwise, or the system has no /proc to measure with.
    """
    if not _STATUS.is_file():
        raise RuntimeError(f"load-memory: {_STATUS} is needed to measure a process's peak memory; run it on Linux")
    return run_child("load-memory: the loading process", "jaxinfer.bench.load_memory", [model, dtype])


def _measure(model: str | None, dtype: str) -> dict[str, Any]:
    import jax

    from jaxinfer.checkpoint.hub import resolve_model
    from jaxinfer.engine.load import auto_dtype, load_model

    importlib.import_module("tensorstore")  # which the loader imports for native checkpoints alone
    jax.devices()
    resolved = resolve_model(model)
    dtype = auto_dtype() if dtype == "auto" else dtype
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which the imports may have set
    baseline = _status_bytes("VmRSS")
    start_s = time.monotonic()
    params = jax.block_until_ready(load_model(resolved.path, dtype).params)
    load_s = time.monotonic() - start_s
    peak = _status_bytes("VmHWM") - baseline
    params_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    limit = round(LIMIT_FACTOR * params_bytes) + LIMIT_EXTRA_BYTES
    return {
        "model": str(resolved.path),
        "kind": resolved.kind,
        "dtype": dtype,
        "params_bytes": params_bytes,
        "baseline_rss_bytes": baseline,
        "peak_rss_bytes": peak,
        "limit_bytes": limit,
        "within_limit": peak <= limit,
        "load_s": round(load_s, 3),
    }


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status, which counts in KiB."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    serve_child(_measure)
