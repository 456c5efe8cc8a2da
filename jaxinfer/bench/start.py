"""How long a process takes from its start to its first token: `python -m jaxinfer.bench start`."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxinfer.bench.child import run_child, serve_child
from jaxinfer.bench.spread import spread

FIRST_LIMIT_S = 25.0
SECOND_LIMIT_S = 4.0


def measure_start(model: str | None, dtype: str, repeats: int) -> dict[str, Any]:
    """Start a process with an empty folder for programs, and then `repeats` more with what it left there.

    Each makes an `LLM` with its default settings and one greedy token. jax's own compilation cache is off.

    Args:
        model: what `LLM(model=…)` takes.
        dtype: "auto" or one of `jaxinfer.config.DTYPES`.

    Returns:
        `dtype` and `source` as they were resolved; `first` and `second` with `first_token_s` since the process was
        started (a spread in `second`), `phases_s` by name and the counts of `LLM.stats` (in `second` of the quickest
        start); `first.all_compiled_s` is when the programs that follow in the background were there too.

    Raises:
        ValueError: the model could not be loaded; the message is the loader's.
        RuntimeError: a process failed otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="jaxinfer-start-") as folder:
        first = _run(model, dtype, folder, wait=True)
        seconds = [_run(model, dtype, folder, wait=False) for _ in range(repeats)]
    second = dict(min(seconds, key=lambda each: each["first_token_s"]))
    second["first_token_s"] = spread([each["first_token_s"] for each in seconds])
    common = {name: first.pop(name) for name in ("dtype", "source")}
    return {**common, "first": first, "second": {name: second[name] for name in second if name not in common}}


def _run(model: str | None, dtype: str, folder: str, wait: bool) -> dict[str, Any]:
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    arguments = [model, dtype, folder, wait, time.time()]
    return run_child("start: the process", "jaxinfer.bench.start", arguments, environment)


class _Collector(logging.Handler):
    """Keeps the phases that are logged until the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.phases_s: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if (name := getattr(record, "phase", None)) is not None:
            self.phases_s[name] = round(getattr(record, "phase_s", 0.0), 3)


def _start(model: str | None, dtype: str, folder: str, wait: bool, started_s: float) -> dict[str, Any]:
    collector = _Collector()
    logging.getLogger("jaxinfer").addHandler(collector)
    logging.getLogger("jaxinfer").setLevel(logging.INFO)

    from jaxinfer.llm import LLM
    from jaxinfer.request import SamplingParams

    llm = LLM(model, dtype=dtype, compilation_cache=Path(folder) / "programs", verbose=False)
    llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    found: dict[str, Any] = {"first_token_s": round(time.time() - started_s, 3), "phases_s": dict(collector.phases_s)}
    stats = llm.stats()
    if wait:
        llm.wait_until_compiled()
        found["all_compiled_s"] = round(time.time() - started_s, 3)
    names = ("num_compiles", "num_programs_loaded", "compile_time_s")
    found |= {name: round(stats[name], 3) for name in names}
    found |= {"dtype": llm.engine.config.dtype, "source": llm.source}
    llm.close()
    return found


if __name__ == "__main__":
    serve_child(_start)
