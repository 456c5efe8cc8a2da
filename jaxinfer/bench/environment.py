"""Where and with what a report was made."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's name as Linux tells it, else the best that Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown")


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(dtype: str, source: str) -> dict[str, str | int]:
    """Date, versions, machine, and the line that says which model it was. Imports jax."""
    import jax

    return {
        "date": _now(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "num_cores": num_cores(),
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "model": source,
    }


def client_environment(server: str, model: str, load: float | int) -> dict[str, str]:
    """Date, machine, and what was asked: the server in words, and the machine's load before. Imports no jax."""
    return {
        "date": _now(),
        "server": server,
        "model": model,
        "client": f"Python {platform.python_version()}, {num_cores()} cores of {cpu_model()}",
        "load": f"{load:.2f} on this machine before",
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
