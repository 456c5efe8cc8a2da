"""How an engine that failed in a step says so."""

from __future__ import annotations


class EngineError(RuntimeError):
    """A step failed and took the request with it. The engine was reset and takes new requests; the cause is chained."""


class RequestError(RuntimeError):
    """A request ended with finish_reason "error" where the caller gets its text alone. The message is the reason."""


class EngineDeadError(EngineError):
    """A step failed and the engine could not be reset: make a new one."""
