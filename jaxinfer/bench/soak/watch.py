"""What a soak watches beside the answers: the server's process, its metrics, and whether they stay flat."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERATED_BYTES = 16 << 20
TOLERATED_SHARE = 0.02
TOLERATED_FILES = 4
TOLERATED_THREADS = 4
_FEWEST_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """A process at a moment of `time.monotonic`. `num_threads` is None where only its metrics can be read."""

    at_s: float
    rss_bytes: int
    num_files: int
    num_threads: int | None = None


def sample_process(pid: int) -> Sample | None:
    """Of a process on this machine; None where it is gone, or this is no Linux."""
    try:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        num_files = len(os.listdir(f"/proc/{pid}/fd"))
        rss_bytes = int(fields["VmRSS"].split()[0]) * 1024  # VmRSS is in kB, proc_pid_status(5)
        return Sample(time.monotonic(), rss_bytes, num_files, int(fields["Threads"]))
    except (OSError, LookupError, ValueError):
        return None


def sample_metrics(text: str) -> Sample | None:
    """Of the process that wrote these metrics."""
    found = read_metrics(text)
    names = ("process_resident_memory_bytes", "process_open_fds")
    if not all(found.get(name) for name in names):
        return None
    rss, files = (sum(found[name].values()) for name in names)
    return Sample(time.monotonic(), int(rss), int(files))


def read_metrics(text: str) -> dict[str, dict[str, float]]:
    """Values by name and labels, of Prometheus's text format. Raises `ValueError` for other text."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            found.setdefault(name, {})[labels.rstrip("}")] = float(value)
    return found


class Watch:
    """Samples every `interval_s` while it is entered."""

    def __init__(self, take: Callable[[], Awaitable[Sample | None]], interval_s: float | int = 1.0):
        self.samples: list[Sample] = []
        self._take = take
        self._interval_s = interval_s

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if (sample := await self._take()) is not None:
                self.samples.append(sample)
            await asyncio.sleep(self._interval_s)


def growth(samples: Sequence[Sample], measure: Callable[[Sample], int]) -> tuple[float | int, float | int] | None:
    """Medians of the second and of the last quarter; the first is warm-up. None where there are too few samples."""
    if len(samples) < _FEWEST_SAMPLES:
        return None
    size = len(samples) // 4
    second, last = samples[size : 2 * size], samples[-size:]
    return statistics.median(map(measure, second)), statistics.median(map(measure, last))


def tolerated_bytes(rss_bytes: float | int) -> float:
    """How much memory may grow and still be called flat."""
    return TOLERATED_BYTES + TOLERATED_SHARE * rss_bytes


def not_flat(samples: Sequence[Sample]) -> list[str]:
    """What has grown while the load stayed the same."""
    faults = []
    if (rss := growth(samples, lambda sample: sample.rss_bytes)) is not None:
        before, after = rss
        if after - before > tolerated_bytes(before):
            allowed = tolerated_bytes(before) / 2**20
            faults.append(
                f"memory grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB, {allowed:.1f} MiB are tolerated"
            )
    threads = [sample for sample in samples if sample.num_threads is not None]
    if (num := growth(threads, lambda sample: sample.num_threads or 0)) is not None:
        before, after = num
        if after - before > TOLERATED_THREADS:
            faults.append(f"threads grew from {before:g} to {after:g}, {TOLERATED_THREADS} more are tolerated")
    return faults


def not_idle(metrics: dict[str, dict[str, float]], health: dict[str, Any]) -> list[str]:
    """What an idle server must not have, by its metrics and its health."""
    faults = []
    for name in ("num_requests_running", "num_requests_waiting", "pages_used"):
        values = metrics.get(f"jaxinfer:{name}")
        if values is None:
            faults.append(f"/metrics has no jaxinfer:{name}")
        elif sum(values.values()) != 0:
            faults.append(f"{name} is {sum(values.values()):g} when nobody asks")
    if health.get("status") != "ok" or health.get("num_failed_steps") != 0:
        faults.append(f"/health tells {health}")
    for labels, num in metrics.get("jaxinfer:http_requests_total", {}).items():
        if 'status="5' in labels and num:
            faults.append(f"{num:g} answers of {labels}")
    return faults
