"""How long the phases of a start take, said on the logger "jaxinfer" at level info."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("jaxinfer")

LOG_LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the time that the body takes, unless it raises."""
    start_s = time.perf_counter()
    yield
    log_phase(name, time.perf_counter() - start_s)


def log_phase(name: str, seconds: float | int) -> None:
    """Log a phase; the record carries `phase` and `phase_s` for programs that collect them."""
    logger.info("%s: %.2f s", name, seconds, extra={"phase": name, "phase_s": seconds})


def show_logs(level: str) -> None:
    """Send this package's records from `level` up, one of `LOG_LEVELS`, to stderr: for commands, not libraries."""
    logging.basicConfig(format="%(name)s %(levelname)s: %(message)s")
    logger.setLevel(level.upper())


def process_age_s() -> float | None:
    """Seconds since this process began; None where the system does not tell (it has no /proc)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
