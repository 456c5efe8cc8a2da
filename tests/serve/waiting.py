"""Waiting for what happens in another thread."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return once the condition holds; fail where it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def is_idle(llm) -> bool:
    """Whether an engine runs no request and no page is held."""
    stats = llm.stats()
    return not stats["num_running"] and not stats["queue_len"] and not stats["pages_used"]
