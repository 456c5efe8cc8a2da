"""Jobs in processes of their own: their inputs, and what they and their memory came to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BATCH, STAND_IN = "jaxinfer.batch", "jaxinfer.batch.stand_in"
_POLL_S = 0.05
_WORDS = (
    "river",
    "stone",
    "seven",
    "light",
    "garden",
    "music",
    "paper",
    "window",
    "silver",
    "market",
    "winter",
    "bread",
)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Records as lines."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def mixed_records(num: int, num_prefixes: int, num_prefix_words: int, longest_tokens: int) -> list[dict[str, Any]]:
    """Records with prompts of 4 to 63 words, every other one after one of a few shared prefixes, in no order.

    Each has its own `seed` and a `max_tokens` from a quarter of `longest_tokens` up. The same on every call.
    """
    rng = random.Random(0)
    prefixes = [_text(rng, num_prefix_words) for _ in range(num_prefixes)]
    records = []
    for index in range(num):
        prompt = _text(rng, round(4 * 16 ** rng.random()))
        if index % 2 and prefixes:
            prompt = f"{rng.choice(prefixes)} {prompt}"
        records.append(
            {"prompt": prompt, "max_tokens": rng.randint(-(-longest_tokens // 4), longest_tokens), "seed": index}
        )
    rng.shuffle(records)
    return records


def short_records(num: int) -> Iterable[dict[str, Any]]:
    """Records with a short prompt and a field to copy."""
    return ({"prompt": f"{index * 7919 % 1009} plus {index * 104729 % 997} is", "id": index} for index in range(num))


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def run_job(
    module: str, source: Path, output: Path, flags: Sequence[str], watch: Callable[[int], object] = lambda pid: None
) -> dict[str, Any]:
    """Run a job to its end, calling `watch` with its process's id now and then; returns its summary.

    Raises:
        RuntimeError: it failed; the message has its last line.
    """
    command = [sys.executable, "-m", module, "--input", str(source), "--output", str(output), "--quiet", *flags]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                watch(process.pid)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        if process.returncode:
            last = log.read().strip().rpartition("\n")[2]
            raise RuntimeError(f"python -m {module} ended with {process.returncode}: {last}")
    return json.loads((output / "summary.json").read_bytes())


class ProcessorTime:
    """What a process has used by when, noted whenever it is called with the process's id; nothing but on Linux."""

    def __init__(self) -> None:
        self._noted: list[tuple[float, float]] = []

    def __call__(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc_pid_stat(5)
        self._noted.append((time.monotonic(), used_s))

    def of_the_last(self, seconds: float) -> float:
        """Seconds of processor time in the last seconds of what was noted."""
        if not self._noted:
            return 0.0
        end_s, used_s = self._noted[-1]
        return used_s - next(before_s for at_s, before_s in self._noted if at_s >= end_s - seconds)


def results_of(output: Path) -> list[dict[str, Any]]:
    """The results of a job that wrote JSONL, in the order of its input."""
    names = sorted(name for name in os.listdir(output) if name.startswith("results-"))
    return [json.loads(line) for name in names for line in (output / name).read_text(encoding="utf-8").splitlines()]
