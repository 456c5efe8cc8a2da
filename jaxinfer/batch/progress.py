"""How far a job is, for who watches: a bar in a terminal or notebook, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from jaxinfer.batch.records import Result
from jaxinfer.progress import can_show, progress_bar

LINE_EVERY_S = 30.0


class Progress:
    """Counts what this process commits; `stats` are the engine's."""

    def __init__(self, num_records: int, num_before: int, stats: Callable[[], Mapping[str, Any]], quiet: bool):
        self.num_records = num_records
        self.num_results = 0
        self.num_errors = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._num_before = num_before
        self._stats = stats
        self._lock = threading.Lock()
        self._start_s = self._last_s = self._line_s = time.monotonic()
        self._lines = not quiet and not can_show()
        self._bar = progress_bar(total=num_records, initial=num_before, unit="rec", shown=not quiet and can_show())

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def worked_s(self) -> float:
        """From the reading of the first record to the last result or finished file; not what others were waited for."""
        return self._last_s - self._start_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / max(self.worked_s, 1e-9)

    @property
    def cache_hit_rate(self) -> float:
        """Of the tokens of prompts that the engine looked up, those that it had."""
        return float(self._stats().get("prefix_cache_hit_rate", 0.0))

    def opened(self, num_committed: int) -> None:
        """Count what another run has committed of a shard."""
        with self._lock:
            self._num_before += num_committed

    def committed(self, results: Sequence[Result]) -> None:
        """Count results. May be called by any thread."""
        with self._lock:
            self.num_results += len(results)
            self.num_errors += sum(result.error is not None for result in results)
            self.num_prompt_tokens += sum(result.num_prompt_tokens for result in results)
            self.num_output_tokens += sum(result.num_output_tokens for result in results)
            self._last_s = time.monotonic()

    def finished(self) -> None:
        """Note that files were finished. May be called by any thread."""
        self._last_s = time.monotonic()

    def tick(self) -> None:
        """Show what there is to be shown."""
        num_done = self._num_before + self.num_results
        if not self._bar.disable and num_done > self._bar.n:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(num_done - self._bar.n)
        if self._lines and time.monotonic() - self._line_s >= LINE_EVERY_S:
            self._line_s = time.monotonic()
            print(f"jaxinfer: {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """What the bar says, in words."""
        num_done = self._num_before + self.num_results
        left_s = (self.num_records - num_done) * self.elapsed_s / max(1, self.num_results)
        left = f", {timedelta(seconds=round(left_s))} left" if self.num_results and num_done < self.num_records else ""
        return f"{num_done:,} of {self.num_records:,} records, {self._rates()}{left}"

    def _rates(self) -> str:
        errors = f", {self.num_errors:,} errors" if self.num_errors else ""
        return f"{self.output_tokens_per_s:,.0f} tokens/s, cache hits {self.cache_hit_rate:.0%}{errors}"

    def close(self) -> None:
        self._bar.close()
