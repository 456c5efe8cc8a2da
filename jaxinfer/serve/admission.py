"""Who may enter: a bounded queue for all, a bound for each tenant, and nobody once the server drains."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from jaxinfer.serve.errors import ApiError

_RECENT = 64  # finished requests from which Retry-After is guessed


class Admission:
    """Counts what is in the server. Used in one event loop.

    capacity: sequences that may run or wait together.
    per_tenant: requests of one tenant at once; None for no limit.
    """

    def __init__(self, capacity: int, per_tenant: int | None = None):
        self.capacity = capacity
        self.draining = False
        self.num_sequences = 0
        self.num_refused = 0
        self._per_tenant = per_tenant
        self._requests_of: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        return self._requests_of.total()

    @contextmanager
    def enter(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Hold the places of one request while the body runs.

        Raises:
            ApiError: 400 where the request alone is more than the server holds, 429 where it is full or the tenant has
                its share, 503 where it drains.
        """
        self._check(tenant, num_sequences)
        start_s = time.monotonic()
        self.num_sequences += num_sequences
        self._requests_of[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_sequences -= num_sequences
            self._requests_of[tenant] -= 1
            self._requests_of += Counter()  # drops tenants that have none left
            self._seconds.append(time.monotonic() - start_s)
            if not self._requests_of:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    def check_size(self, num_sequences: int) -> None:
        """Raise the 400 for a request that alone is more than the server holds: it can never enter."""
        if num_sequences > self.capacity:
            raise ApiError(
                400,
                f"the request has {num_sequences} sequences (prompts times n or best_of) and the server holds at most "
                f"{self.capacity}; split it",
                code="too_many_sequences",
            )

    def _check(self, tenant: str, num_sequences: int) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is shutting down; ask another", code="draining", headers={"Retry-After": "5"}
            )
        self.check_size(num_sequences)
        if self._per_tenant is not None and self._requests_of[tenant] >= self._per_tenant:
            self._refuse(f"{tenant or 'this client'!r} has {self._per_tenant} requests here already, as many as it may")
        if self.num_sequences + num_sequences > self.capacity:
            self._refuse(f"the server is full: {self.num_sequences} of {self.capacity} sequences run or wait")

    def _refuse(self, message: str) -> None:
        self.num_refused += 1
        mean_s = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        wait_s = min(60, max(1, math.ceil(mean_s)))
        raise ApiError(
            429, f"{message}; try again in {wait_s} s", code="overloaded", headers={"Retry-After": str(wait_s)}
        )
