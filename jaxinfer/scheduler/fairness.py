"""Virtual token counters: what each tenant has been served, so that the one served least comes next.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant that comes back after a pause starts at
the least counter of those that are active: it has no credit from the time when it asked for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""What a token costs: one that is sampled takes a step of its own, as in the paper."""


class VirtualTokenCounters:
    """Counters per tenant. `weights` are shares: a tenant of weight 2 is served twice as much; 1 where none is set."""

    def __init__(self, weights: Mapping[str, float | int] | None = None):
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}
        self._num_active: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """A sequence of the tenant is in the system now."""
        if tenant not in self._num_active:
            least = min((self._served[other] for other in self._num_active), default=0.0)
            # An idle tenant below the least would be lifted when it comes back, and above it still owes.
            self._served = {
                name: served for name, served in self._served.items() if name in self._num_active or served > least
            }
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._num_active[tenant] = self._num_active.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant has left. When all have, nobody owes anything."""
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
        if not self._num_active:
            self._served.clear()

    def charge(self, tenant: str, *, num_input: int = 0, num_output: int = 0) -> None:
        """The tenant was served so many tokens of prompt, computed and not from the cache, and of output."""
        cost = INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output
        self._served[tenant] += cost / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """The counter of an active tenant."""
        return self._served[tenant]
