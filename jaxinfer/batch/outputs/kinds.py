"""What passed-through values are, for formats that want a type; and as JSON, for the one that wants none."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """item: bool, int, wide (an int that no float holds exactly), float, text, bytes or json; None of nothing.

    A list of what has no one kind, and whatever else JSON can hold, is json as a whole.
    """

    is_list: bool
    item: str | None


_JSON = Kind(False, "json")
_WIDER = {
    frozenset(("int", "wide")): "wide",
    frozenset(("int", "float")): "float",
    frozenset(("text", "bytes")): "bytes",
}


def kind_of(value: Any) -> Kind:
    if not isinstance(value, list):
        return Kind(False, _item_kind(value))
    if None in value:
        return _JSON
    item = reduce(_common, map(_item_kind, value), None)
    return _JSON if item == "json" else Kind(True, item)


def common_kind(kinds: Iterable[Kind], single_is_list: bool) -> Kind:
    """One that values of all `kinds` can be written as.

    single_is_list: one value and a list of one are the same, as in a `tf.train.Example`.
    """

    def wider(one: Kind, other: Kind) -> Kind:
        nothing = Kind(False, None)
        if nothing in (one, other):
            return one if other == nothing else other
        if one.is_list != other.is_list and not single_is_list:
            return _JSON
        item = _common(one.item, other.item)
        return _JSON if item == "json" else Kind(one.is_list or other.is_list, item)

    return reduce(wider, kinds, Kind(False, None))


def _item_kind(value: Any) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "bool"
        case int():
            return "int" if -(2**53) <= value <= 2**53 else "wide" if -(2**63) <= value < 2**63 else "json"
        case float():
            return "float"
        case str():
            return "text"
        case bytes():
            return "text" if as_text(value) is not None else "bytes"
    return "json"


def _common(one: str | None, other: str | None) -> str | None:
    if one == other or other is None:
        return one
    return other if one is None else _WIDER.get(frozenset((one, other)), "json")


def one_or_list(values: Any) -> Any:
    """A feature of a `tf.train.Example`: its only value, or all."""
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def as_text(value: bytes) -> str | None:
    """None where it is no UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def encoded(text: str) -> bytes:
    """In UTF-8. What no UTF-8 can hold, half of a surrogate pair as in names of files, is written as its escape."""
    return text.encode("utf-8", "backslashreplace")


def json_text(value: Any) -> bytes:
    """In one line. Bytes are their text or `{"base64": …}`; floats that JSON lacks "NaN", "Infinity", "-Infinity"."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return encoded(text)


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            text = as_text(value)
            return {"base64": base64.b64encode(value).decode()} if text is None else text
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value
