"""A benchmark's report, as one JSON object or as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


def target(
    name: str, value: float | int, *, at_most: float | int | None = None, at_least: float | int | None = None
) -> dict[str, Any]:
    """One figure and the limit it is meant to keep."""
    if at_most is not None:
        return {"name": name, "value": value, "at_most": at_most, "met": value <= at_most}
    return {"name": name, "value": value, "at_least": at_least, "met": at_least is not None and value >= at_least}


def as_json(report: Report) -> str:
    return json.dumps(report, allow_nan=False)


def as_text(report: Report) -> str:
    """Tables for people: what it ran on, then each figure with median, best and worst, then the targets."""
    lines = [f"{name:<12} {value}" for name, value in report["environment"].items()]
    lines.append("settings     " + ", ".join(f"{name}={value}" for name, value in report["settings"].items()))
    lines += ["", *_table([["", "median", "best", "worst", "num"], *_rows("", report["results"])])]
    for each in report["targets"]:
        kind = "at most" if "at_most" in each else "at least"
        limit = each.get("at_most", each.get("at_least"))
        lines.append(f"{each['name']}: {_number(each['value'])}, {kind} {limit}: {'met' if each['met'] else 'missed'}")
    return "\n".join(lines)


def _rows(prefix: str, value: Any) -> list[list[str]]:
    """One line a figure. The first entry of a list's item names it."""
    if isinstance(value, Mapping) and set(value) == {"median", "best", "worst", "num"}:
        return [[prefix, *(_number(value[key]) for key in ("median", "best", "worst", "num"))]]
    if isinstance(value, Mapping):
        return [row for name, item in value.items() for row in _rows(f"{prefix}.{name}".lstrip("."), item)]
    if isinstance(value, list):
        rows = []
        for item in value:
            name, number = next(iter(item.items()))
            rest = {key: item[key] for key in item if key != name}
            rows += _rows(f"{prefix}[{name}={number}]", rest)
        return rows
    return [[prefix, _number(value), "", "", ""]]


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
