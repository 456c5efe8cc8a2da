"""Service-level objectives: `ttft:500ms tpot:50ms e2e:5s`, and the share of requests that meet them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxinfer.bench.serve.records import Record

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MEASURES = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> tuple[str, float]:
    """`"ttft:500ms"` as `("ttft", 0.5)`.

    Raises:
        ValueError: not a measure, a colon, a number and a unit.
    """
    name, colon, limit = text.partition(":")
    if not colon or name not in MEASURES:
        raise ValueError(f"{text!r}: must be {', '.join(MEASURES[:-1])} or {MEASURES[-1]}, a colon and a limit")
    for unit, seconds in _UNITS_S.items():
        number = limit.removesuffix(unit)
        if number == limit:
            continue
        try:
            value = float(number) * seconds
        except ValueError:
            break
        if math.isfinite(value) and value > 0:
            return name, value
        break
    raise ValueError(f"{text!r}: the limit must be a number above 0 with a unit, such as 500ms or 5s")


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether the request succeeded within every limit. One token has no TPOT, and meets any."""
    if not record.ok:
        return False
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((value := values[name]) is None or value <= limit for name, limit in slo.items())


def goodput(records: Sequence[Record], slo: Mapping[str, float], duration_s: float | int) -> dict[str, float | int]:
    """`num_met`, its `share` of all requests, failed ones included, and `requests_per_s` of them."""
    num_met = sum(meets(record, slo) for record in records)
    share = num_met / len(records) if records else 0.0
    return {"num_met": num_met, "share": share, "requests_per_s": num_met / duration_s if duration_s else 0.0}
