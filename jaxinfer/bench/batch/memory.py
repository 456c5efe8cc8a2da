"""Whether the memory of a job stays flat over many records."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.batch.job import BATCH, STAND_IN, run_job, short_records, write_jsonl
from jaxinfer.bench.soak.watch import Sample, not_flat, sample_process

_QUARTERS = 4


def measure_memory(
    num_records: int, output_tokens: int, *, stand_in: bool, model: str | None, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a job of so many short records, and watch its process.

    Returns:
        `records_per_s` of the job's own seconds, and `records_per_s_with_start` of the whole process, which also starts
        and counts the input; the median of resident memory in each quarter of the samples taken after the start, and
        `peak_rss_bytes`; `growth`, in words, where it is not flat between the second quarter and the last.

    Raises:
        RuntimeError: the job failed, or the system has no /proc to measure with.
    """
    samples: list[Sample] = []
    peaks: list[int] = [0]

    def watch(pid: int) -> None:
        if (sample := sample_process(pid)) is not None:
            samples.append(sample)
            peaks[0] = max(peaks[0], _peak_bytes(pid), sample.rss_bytes)

    flags = [*flags, "--max-tokens", str(output_tokens), "--ignore-eos"]
    flags += [] if model is None else ["--model", model]
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "prompts.jsonl"
        write_jsonl(source, short_records(num_records))
        start_s = time.monotonic()
        summary = run_job(STAND_IN if stand_in else BATCH, source, Path(name) / "results", flags, watch)
        elapsed_s = time.monotonic() - start_s
    run = summary["run"]
    worked = [sample for sample in samples if sample.at_s >= start_s + elapsed_s - run["seconds"]]
    if len(worked) < 2 * _QUARTERS:
        raise RuntimeError(f"memory: {len(worked)} samples were taken, too few: give more records, on Linux")
    size = len(worked) // _QUARTERS
    quarters = [worked[number * size : (number + 1) * size] for number in range(_QUARTERS)]
    return {
        "records": summary["records"],
        "errors": summary["errors"],
        "records_per_s": run["records"] / run["seconds"],
        "records_per_s_with_start": num_records / elapsed_s,
        "rss_bytes": [
            {"quarter": number, "median": int(statistics.median(each.rss_bytes for each in quarter))}
            for number, quarter in enumerate(quarters, 1)
        ],
        "peak_rss_bytes": peaks[0],
        "growth": "; ".join(not_flat(worked)) or "none",
    }


def _peak_bytes(pid: int) -> int:
    """What the process's resident memory has been at most; 0 where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
