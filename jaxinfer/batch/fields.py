"""Sampling fields as records and flags have them: values of an Example, of JSON or of Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from jaxinfer.request import SamplingParams
from jaxinfer.structured.forms import form_of

ARRAYS = ("return_hidden_states", "return_logits")
"""Sampling fields that a job does not have: no format of its results holds arrays."""


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` of fields as flags have them.

    Raises:
        ValueError: a field that is unknown, of the wrong type or out of its range.
    """
    params = SamplingParams(**{name: plain(name, value) for name, value in given.items()})
    if array := next((name for name in ARRAYS if getattr(params, name)), None):
        raise ValueError(f"{array}: results hold no arrays; call LLM.generate for them, or leave it out")
    return params


def plain(name: str, value: Any) -> Any:
    """A sampling field's value as `SamplingParams` takes it; None stays None.

    Bytes are UTF-8. Where one value is wanted, a list of one is that value, and an empty one None. Objects may be
    given as JSON text. 0 and 1 are False and True.

    Raises:
        ValueError: another type than the field's, with what it must be.
    """
    if value is None or (read := _READERS.get(name)) is None:
        return value
    return read(name, text_of(name, value))


def text_of(name: str, value: Any) -> Any:
    """A value with its bytes, and those of a list, as text. Raises `ValueError` for what is no UTF-8."""
    if isinstance(value, list):
        return [text_of(name, each) for each in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: it is no UTF-8 at byte {error.start}") from None


def single(name: str, value: Any) -> Any:
    """The one value of a list. Raises `ValueError` where it has more."""
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        raise ValueError(f"{name} has {len(value)} values; it takes one")
    return value[0] if value else None


def _whole(name: str, value: Any) -> int | None:
    value = single(name, value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{name}={value!r:.60} must be a whole number")
    return value


def _number(name: str, value: Any) -> float | int | None:
    value = single(name, value)
    if value is not None and (not isinstance(value, float | int) or isinstance(value, bool)):
        raise ValueError(f"{name}={value!r:.60} must be a number")
    return value


def _flag(name: str, value: Any) -> bool | None:
    value = single(name, value)
    if value is not None and (not isinstance(value, int) or value not in (0, 1)):
        raise ValueError(f"{name}={value!r:.60} must be true or false")
    return None if value is None else bool(value)


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name}={value!r:.60} must be a list of texts")
    return list(value)


def _text_or_texts(name: str, value: Any) -> str | list[str]:
    return value if isinstance(value, str) else _texts(name, value)


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list | tuple) or not all(type(each) is int for each in value):
        raise ValueError(f"{name}={value!r:.60} must be a list of token ids")
    return list(value)


def from_json(name: str, value: Any) -> Any:
    """A value that may be given as JSON text.

    Raises:
        ValueError: the text is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it is no JSON: {error!s:.200}") from None


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r:.60} must be an object, or its JSON text")
    return dict(value)


def _numbers(name: str, value: Any) -> dict[Any, float | int]:
    found = {key: each for key, each in _mapping(name, value).items() if each is not None}  # Parquet fills with null
    for key, each in found.items():
        if _number(name, each) is None or isinstance(each, list):
            raise ValueError(f"{name}[{key!r:.60}]={each!r:.60} must be a number")
    return found


def _bias(name: str, value: Any) -> dict[int, float | int] | None:
    value = from_json(name, single(name, value))
    return None if value is None else {_token_id(key): each for key, each in _numbers(name, value).items()}


def _token_id(key: Any) -> int:
    """JSON has no keys but strings."""
    if type(key) is int:
        return key
    if not isinstance(key, str) or not (key.isascii() and key.isdecimal()) or len(key) > 10:
        raise ValueError(f"logit_bias: {key!r:.40} is no token id")
    return int(key)


def _processors(name: str, value: Any) -> Any:
    """Names, or an object with their parameters."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        value = from_json(name, value) if value.lstrip()[:1] in ("{", "[") else [value]
    if isinstance(value, list):
        return _texts(name, value)
    return {key: _numbers(f"{name}[{key!r:.60}]", each) for key, each in _mapping(name, value).items()}


def _form(name: str, value: Any) -> Any:
    return form_of({name: from_json(name, single(name, value))})


_Reader = Callable[[str, Any], Any]
_BY_TYPE: dict[str, _Reader] = {
    "int": _whole,
    "int | None": _whole,
    "float | int": _number,
    "bool": _flag,
    "Sequence[int] | None": _ids,
    "Sequence[str] | None": _texts,
    "str | Sequence[str] | None": _text_or_texts,
    "Mapping[int, float | int] | None": _bias,
    "Mapping[str, Mapping[str, float | int]] | Sequence[str] | None": _processors,
    "StructuredOutputsParams | None": _form,
}
_READERS = {each.name: _BY_TYPE[str(each.type)] for each in fields(SamplingParams)}
