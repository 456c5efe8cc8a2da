"""Output tokens/s of the batch command over those of `LLM.generate`, on the same prompts in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.batch.generate import Generate
from jaxinfer.bench.batch.job import BATCH, ProcessorTime, mixed_records, results_of, run_job, write_jsonl
from jaxinfer.bench.spread import spread

_SAMPLING = {"temperature": 0.8, "ignore_eos": True}


def measure_batch(
    model: str | None,
    settings: Mapping[str, Any],
    *,
    num_records: int,
    num_prefixes: int,
    prefix_words: int,
    output_tokens: int,
    windows: Sequence[int],
    repeats: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment, and the results.

    A repeat runs `LLM.generate` and then a job for each of `windows`. The job's seconds are those of its summary: from
    reading its first record to the last file, with neither the loading of the model nor the first pass over the input.
    Of `LLM.generate` they are those of the call. A first job, not counted, has the programs compiled and stored; a job
    still loads them beside its first steps, where `LLM.generate` has them all. Processor time per token is what other
    work on the machine disturbs least.

    Raises:
        ValueError, RuntimeError: a process failed.
    """
    records = mixed_records(num_records, num_prefixes, prefix_words, output_tokens)
    num_tokens = sum(record["max_tokens"] for record in records)
    flags = [word for name, value in settings.items() for word in _flag(name, value)]
    flags += ["--temperature", str(_SAMPLING["temperature"]), "--ignore-eos", "--format", "jsonl"]
    flags += [] if model is None else ["--model", model]
    generated = _Runs()
    jobs = {window: _Runs() for window in windows}
    same = True
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Path(name) / "prompts.jsonl"
        write_jsonl(source, records)
        with Generate(model, settings, source, _SAMPLING) as generate:
            run_job(BATCH, source, folder / "warm-up", [*flags, "--limit", "8"])
            for repeat in range(repeats):
                once = generate.run()
                generated.add(num_tokens / once["seconds"], once["cpu_s"] / num_tokens, once["cache_hit_rate"])
                for window in windows:
                    output, used = folder / f"{window}-{repeat}", ProcessorTime()
                    run = run_job(BATCH, source, output, [*flags, "--window", str(window)], used)["run"]
                    cpu_s = used.of_the_last(run["seconds"])
                    jobs[window].add(num_tokens / run["seconds"], cpu_s / num_tokens, run["cache_hit_rate"])
                    found = [result["choices"][0]["token_ids"] for result in results_of(output)]
                    same = same and found == once["token_ids"]
            about = generate.first
    rows = [{"window": window, **job.over(generated), **job.report()} for window, job in jobs.items()]
    return about, {"output_tokens": num_tokens, "generate": generated.report(), "jobs": rows, "same_tokens": same}


class _Runs:
    """Repeats of one thing."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._cpu_s: list[float] = []
        self._cache_hit_rate = 0.0

    def add(self, output_tokens_per_s: float, cpu_s_per_token: float, cache_hit_rate: float | int) -> None:
        self._rates.append(output_tokens_per_s)
        self._cpu_s.append(cpu_s_per_token)
        self._cache_hit_rate = cache_hit_rate

    def over(self, other: _Runs) -> dict[str, Any]:
        """Ratios within each repeat."""
        rates = [one / base for one, base in zip(self._rates, other._rates, strict=True)]
        cpu_s = [one / base for one, base in zip(self._cpu_s, other._cpu_s, strict=True)]
        return {"over_generate": spread(rates, higher_is_better=True), "cpu_over_generate": spread(cpu_s)}

    def report(self) -> dict[str, Any]:
        return {
            "output_tokens_per_s": spread(self._rates, higher_is_better=True),
            "cpu_s_per_token": spread(self._cpu_s),
            "cache_hit_rate": self._cache_hit_rate,
        }


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
