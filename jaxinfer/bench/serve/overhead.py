"""What the client itself adds to the figures: a late event loop, processor time, time until bytes are stamped."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.stats import percentile, summary

_INTERVAL_S = 0.02
_STAMP = struct.Struct("d")
_MAX_CPU_SHARE = 0.7
_NOTEWORTHY_S = 0.002  # selectors wait for whole milliseconds, so that every timer is up to one late


class OverheadMonitor:
    """Samples the event loop while it is entered.

    Every 20 ms it wakes and notes how late it is (`loop_lag_s`), and sends itself the time through a socket pair, which
    comes back by way of the loop and a stream reader as a server's bytes do (`byte_to_stamp_s`). It costs about 0.2% of
    a core.
    """

    def __init__(self) -> None:
        self.loop_lag_s: list[float] = []
        self.byte_to_stamp_s: list[float] = []
        self.cpu_share = 0.0

    async def __aenter__(self) -> OverheadMonitor:
        self._sender, receiver = socket.socketpair()
        self._sender.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=receiver)
        self._tasks = [asyncio.create_task(self._sample()), asyncio.create_task(self._stamp(reader))]
        self._start_s, self._start_cpu_s = time.perf_counter(), _cpu_s()
        return self

    async def __aexit__(self, *exc: object) -> None:
        elapsed_s = time.perf_counter() - self._start_s
        self.cpu_share = (_cpu_s() - self._start_cpu_s) / elapsed_s if elapsed_s else 0.0
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._writer.close()
        self._sender.close()

    async def _sample(self) -> None:
        while True:
            due_s = time.perf_counter() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            now_s = time.perf_counter()
            self.loop_lag_s.append(now_s - due_s)
            with contextlib.suppress(BlockingIOError):
                self._sender.send(_STAMP.pack(time.perf_counter()))

    async def _stamp(self, reader: asyncio.StreamReader) -> None:
        while True:
            (sent_s,) = _STAMP.unpack(await reader.readexactly(_STAMP.size))
            self.byte_to_stamp_s.append(time.perf_counter() - sent_s)


def _cpu_s() -> float:
    """Processor time of this process, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def overhead_report(monitor: OverheadMonitor, records: Sequence[Record]) -> dict[str, Any]:
    """What was sampled; `schedule_slip_s` is how much later than scheduled the client began with a request."""
    return {
        "schedule_slip_s": summary([record.woke_s - record.due_s for record in records]),
        "loop_lag_s": summary(monitor.loop_lag_s),
        "byte_to_stamp_s": summary(monitor.byte_to_stamp_s),
        "cpu_share_of_a_core": monitor.cpu_share,
    }


def overhead_warnings(
    report: Mapping[str, Any], ttft_s: Sequence[float | int], gaps_s: Sequence[float | int]
) -> list[str]:
    """One line for each way in which the client spoils the figures: a tenth of what it measures, or a busy core."""
    found = []
    share = report["cpu_share_of_a_core"]
    if share > _MAX_CPU_SHARE:
        found.append(f"the client used {share:.0%} of a core, so answers waited for it; send less at once")
    comparisons = (
        ("schedule_slip_s", "late to send", ttft_s, "TTFT"),
        ("loop_lag_s", "late to wake", gaps_s, "ITL"),
        ("byte_to_stamp_s", "late to see bytes", gaps_s, "ITL"),
    )
    for name, what, measured, measure in comparisons:
        if report[name] is None or not measured:
            continue
        late_s, typical_s = report[name]["p99"], percentile(sorted(measured), 50)
        if late_s > max(_NOTEWORTHY_S, typical_s / 10):
            found.append(
                f"the client was {what} by {late_s * 1e3:.2g} ms (p99), beside a median {measure} of "
                f"{typical_s * 1e3:.2g} ms"
            )
    return found
