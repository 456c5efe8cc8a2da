"""Ctrl-C at safe points only: between donating a buffer and keeping its successor, an interrupt would lose both."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """`with DeferredInterrupts() as interrupts:` holds SIGINT back until `interrupts.check()` or the end of the body.

    The handler that was in place is then called, so that `KeyboardInterrupt`, or what an event loop or a notebook does
    instead, happens there. Sections nest: an inner one hands its interrupt to the outer one. Python runs signal
    handlers in the main thread, so in other threads, and where SIGINT has no Python handler, this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._arrived = False

    def __enter__(self) -> DeferredInterrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.check()

    def check(self) -> None:
        """Let an interrupt that has arrived happen now."""
        if self._arrived and self._handler is not None:
            self._arrived = False
            self._handler(signal.SIGINT, inspect.currentframe())

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = True
