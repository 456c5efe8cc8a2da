"""Programs of the engine: compiled or taken from the store, each once, from whatever thread asks first."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from numbers import Real
from typing import Any, Generic, TypeVar

import jax

from jaxinfer.engine.program_store import ProgramStore

logger = logging.getLogger("jaxinfer")

Key = TypeVar("Key", bound=Hashable)
Parts = dict[str, Any]
"""The compiled parts of a program by name, as jax's `Compiled`."""


class Compiler:
    """Makes programs and counts: `num_compiles`, `num_loaded` from the store, `compile_time_s` for both."""

    def __init__(self, store: ProgramStore | None = None):
        self.store = store
        self.num_compiles = 0
        self.num_loaded = 0
        self.compile_time_s = 0.0
        self._lock = threading.Lock()

    def get(self, name: str, description: Any, compile: Callable[[], Parts]) -> Parts:
        """The parts of a program: stored ones where `description` has some, else compiled and then stored.

        Args:
            name: for the log.
            description: everything that the program follows from besides this package's own code: pytrees of plain
                values, `abstract` arrays and module definitions.
        """
        start_s = time.perf_counter()
        key = self.store.key_of(name, description) if self.store else None
        parts = self.store.load(key) if self.store and key else None
        loaded = parts is not None
        if parts is None:
            parts = compile()
        seconds = time.perf_counter() - start_s
        with self._lock:
            self.num_loaded += loaded
            self.num_compiles += not loaded
            self.compile_time_s += seconds
        how = "loaded" if loaded else "compiled"
        extra = {"phase": f"program {name}", "phase_s": seconds, "loaded": loaded}
        logger.info("program %s: %s in %.2f s", name, how, seconds, extra=extra)
        if self.store and key and not loaded:
            self.store.save(key, parts)
        return parts


class ProgramTable(Generic[Key]):
    """Programs by key, each made by `make(key)` when it is first asked for. Safe from several threads.

    It refers to no array: a thread that compiles keeps nothing on the device alive.
    """

    def __init__(self, make: Callable[[Key], Any]):
        self._make = make
        self._made: dict[Key, Any] = {}
        self._locks: dict[Key, threading.Lock] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._made

    def __getitem__(self, key: Key) -> Any:
        made = self._made.get(key)
        if made is None:
            with self._locks.setdefault(key, threading.Lock()):
                made = self._made.get(key)
                if made is None:
                    made = self._made[key] = self._make(key)
        return made

    def clear(self) -> None:
        self._made = {}


class BackgroundCompiler:
    """Runs jobs one after another in a thread of its own, until they are done or it is told to stop.

    The running job cannot be interrupted: after `stop` it ends on its own and no other begins. Only at the exit of
    the process it is waited for, since a thread inside XLA while the interpreter goes down can crash the process.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]]):
        self._jobs = list(jobs)
        self._num_jobs = len(self._jobs)
        self._stopped = threading.Event()
        # Waited for in place of the thread: an interrupt in `Thread.join` marks a thread as ended that goes on.
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="jaxinfer-compile", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Begin no further job. Returns at once."""
        self._stopped.set()

    def wait(self, timeout_s: float | int | None = None) -> None:
        """Return when every job is done.

        Raises:
            ValueError: `timeout_s` is no number of seconds from 0 up to `threading.TIMEOUT_MAX`.
            TimeoutError: they were not within `timeout_s`.
            RuntimeError: a job failed, or it was stopped before all were done.
        """
        good = timeout_s is None or (isinstance(timeout_s, Real) and 0 <= timeout_s <= threading.TIMEOUT_MAX)
        if not good or isinstance(timeout_s, bool):
            raise ValueError(f"timeout_s={timeout_s!r:.60} must be a number of seconds from 0 up, or None")
        if not self._ended.wait(None if timeout_s is None else float(timeout_s)):
            raise TimeoutError(f"programs are still being compiled after {timeout_s} s")
        if self._error is not None:
            raise RuntimeError(f"compiling in the background failed: {self._error}") from self._error
        if self._jobs:
            raise RuntimeError("compiling in the background was stopped: the engine is closed")

    def _loop(self) -> None:
        try:
            while self._jobs and not self._stopped.is_set():
                self._jobs[0]()
                del self._jobs[0]
                logger.info("programs: %d of %d ready", self._num_jobs - len(self._jobs), self._num_jobs)
        except Exception as error:
            self._error = error
            message = "a program could not be compiled in the background; steps go on in the shapes that there are"
            logger.error(message, exc_info=error)
        finally:
            atexit.unregister(self._at_exit)
            self._ended.set()

    def _at_exit(self) -> None:
        self.stop()
        self._thread.join()


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a pytree's arrays, and where they were put on purpose."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding if getattr(leaf, "committed", False) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)
