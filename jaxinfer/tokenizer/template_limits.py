"""How much work one rendering may do.

A template comes with a model's files, or with a request, and is a program. Whatever it does is charged to a meter:
steps, characters written, elements built. The meter stops the rendering, so a template can neither fill the memory
nor run on.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

MAX_OUTPUT_CHARACTERS = 16 << 20
MAX_WORK_CHARACTERS = 64 << 20
MAX_SECONDS = 10.0
_STEP_COST = 16
_MAX_ELEMENTS = 1 << 20
_MAX_NUMBER_BITS = 4096
_MAX_INDENT = 32
_MAX_DIGITS = 1000
_MAX_PRECISION = 30
_BACKWARD_SEARCHES = frozenset(("rfind", "rindex", "rpartition", "rsplit"))
# Wide fields turn a few characters into very many.
_WIDE_FIELD = re.compile(r"\d{4}|\*|\{[^{}]*\{")
_PLAIN_DATE = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


class Meter:
    """Counts what one rendering has done: a unit is about one character."""

    def __init__(self) -> None:
        self._left = MAX_WORK_CHARACTERS
        self._deadline = time.monotonic() + MAX_SECONDS

    def charge(self, units: int) -> None:
        """Raises SecurityError when the work or the time is used up."""
        self._left -= units
        if self._left < 0:
            raise SecurityError(f"it does too much work (more than {MAX_WORK_CHARACTERS} characters or steps)")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:.0f} s")


METER: ContextVar[Meter] = ContextVar("meter")


def charge(units: int) -> None:
    METER.get().charge(units)


def step(constant_characters: int = 0) -> str:
    """One loop turn, macro call or output statement, which writes that many constant characters."""
    charge(_STEP_COST + constant_characters)
    return ""


def measure(value: Any) -> None:
    """Charge for writing `value` out, before anything is written: nested lists can be far larger than they look."""
    if isinstance(value, str | bytes):
        charge(1 + len(value))
    elif isinstance(value, Mapping):
        charge(_STEP_COST)
        for key, item in value.items():
            measure(key)
            measure(item)
    elif isinstance(value, list | tuple | set | frozenset):
        charge(_STEP_COST)
        for item in value:
            measure(item)
    else:
        charge(_STEP_COST)


def built(value: Any) -> Any:
    """A list, tuple or dict written in the template: charged with all that it holds, so that doubling is seen."""
    measure(value)
    return value


def charge_result(value: Any) -> Any:
    """Charge for a new string or list."""
    if isinstance(value, str | bytes | list | tuple):
        charge(1 + len(value))
    return value


def concat(*parts: Any) -> str:
    """The `~` operator."""
    for part in parts:
        measure(part)
    return "".join(map(str, parts))


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Charge for `+ * ** %` before they run."""
    sizes = [len(side) if isinstance(side, str | bytes | list | tuple) else None for side in (left, right)]
    if operator == "%" and isinstance(left, str):
        check_format(left)
        measure(right)
    elif sizes != [None, None] and operator in ("+", "*"):
        _check_sequence(operator, sizes, left, right)
    elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_NUMBER_BITS:
            raise SecurityError(f"a number grows beyond {_MAX_NUMBER_BITS} bits")


def _check_sequence(operator: str, sizes: list[int | None], left: Any, right: Any) -> None:
    if operator == "+":
        total = sum(size or 0 for size in sizes)
    else:
        size = sizes[0] if sizes[0] is not None else sizes[1] or 0
        factor = right if sizes[0] is not None else left
        total = size * max(0, factor) if isinstance(factor, int) else 0
    if not isinstance(left, str) and not isinstance(right, str) and total > _MAX_ELEMENTS:
        raise SecurityError(f"a list grows beyond {_MAX_ELEMENTS} elements")
    charge(1 + total)


def check_format(text: str) -> None:
    charge(1 + len(text))
    if _WIDE_FIELD.search(text):
        raise SecurityError("a format asks for a field of a variable width or of a thousand characters or more")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, and non-ASCII characters as they are."""
    for given in (indent, *(separators or ())):
        if (len(given) if isinstance(given, str) else given or 0) > _MAX_INDENT:
            raise SecurityError(f"tojson: an indent or separator is longer than {_MAX_INDENT}")
    measure(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    """The local time now; widths in the format are refused."""
    if len(format) > 1000 or not _PLAIN_DATE.fullmatch(format):
        raise SecurityError(f"strftime_now: unusual format {format[:50]!r}")
    return datetime.now().strftime(format)


def plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` in templates."""
    return built(dict(*args, **kwargs))


class PlainNamespace(Namespace):
    """`namespace(...)` in templates; private names are refused."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def join(value: Any, d: str = "", attribute: Any = None) -> str:
    """Join without autoescaping; the total is known before it is built."""
    items = list(value)
    if attribute is not None:
        items = [item.get(attribute) if isinstance(item, Mapping) else getattr(item, attribute, "") for item in items]
    for item in items:
        measure(item)
    charge(len(d) * len(items))
    return d.join(map(str, items))


def replace(text: str, old: str, new: str, count: int | None = None) -> str:
    """`str.replace`, charged before it runs."""
    text, old, new = str(text), str(old), str(new)
    found = text.count(old)
    charge(1 + len(text) + found * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(max(0, width), _MAX_INDENT + 1)
    if len(pad) > _MAX_INDENT:
        raise SecurityError(f"indent: wider than {_MAX_INDENT}")
    lines = str(text).splitlines()
    charge(1 + len(text) + len(pad) * len(lines))
    padded = [pad + line if (index or first) and (line or blank) else line for index, line in enumerate(lines)]
    return "\n".join(padded)


def _sum(value: Any, attribute: str | None = None, start: Any = 0) -> Any:
    items = [item[attribute] if attribute is not None else item for item in value]
    if not all(isinstance(item, int | float) for item in [*items, start]):
        raise SecurityError("sum: only numbers can be added")
    return sum(items, start)


def _string(value: Any) -> str:
    measure(value)
    return str(value)


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    """The int filter, for numbers of a reasonable length: Python reads long hexadecimal ones without a limit."""
    text = isinstance(value, str)
    try:
        if text and len(value) > _MAX_DIGITS:
            return default
        return int(value, base) if text else int(value)
    except (TypeError, ValueError, OverflowError):
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    """The round filter, for a reasonable number of digits."""
    if abs(precision) > _MAX_PRECISION or method not in ("common", "ceil", "floor"):
        raise SecurityError(f"round: precision {precision} or method {method!r} is out of range")
    if method == "common":
        return round(value, precision)
    return (math.ceil if method == "ceil" else math.floor)(value * 10**precision) / 10**precision


def check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Charge for a method of `text` before it runs, where its result or its time may be far larger than its input."""
    if name == "format":
        check_format(text)
        measure([*args, *kwargs.values()])
    elif name in _BACKWARD_SEARCHES and args and isinstance(args[0], str):
        # Python searches backward in time len(text) * len(part).
        charge(1 + len(text) * len(args[0]) // _STEP_COST)


# Filters that make much of little (center, wordwrap, batch, xmlattr, lipsum …) are left out; chats need none of them.
_KEPT_FILTERS = """abs capitalize count d default dictsort e escape first float forceescape groupby items last
length list lower map max min reject rejectattr reverse safe select selectattr sort title trim truncate
unique upper urlencode wordcount"""
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "indent": _indent, "int": _int, "join": join, "replace": replace, "round": _round, "string": _string, "sum": _sum,
    "tojson": tojson,
}  # fmt: skip


def limited_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters that templates may use, each charging for what it returns."""
    return {name: _charging(filters[name]) for name in _KEPT_FILTERS.split()} | {
        name: _charging(own) for name, own in _OWN_FILTERS.items()
    }


def _charging(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        return charge_result(function(*args, **kwargs))

    return limited


# What templates may call on Python's own types; str.join, replace and format are checked before they run.
_STR_METHODS = """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower
isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
rsplit rstrip split splitlines startswith strip swapcase title upper"""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    bytes: frozenset(),
    int: frozenset(("bit_length", "is_integer")),
    float: frozenset(("is_integer",)),
}


def is_allowed_method(obj: Any, name: str) -> bool:
    """Whether `obj.name` is harmless; other types are the sandbox's business."""
    if isinstance(obj, Undefined):
        return True
    return next((name in names for kind, names in METHODS.items() if isinstance(obj, kind)), True)
