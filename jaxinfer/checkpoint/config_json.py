"""A model's configuration as JSON, and back: what a native checkpoint's manifest keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import ModelConfig, RopeScaling


def model_config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The fields by name, with tuples as lists once they are written."""
    return dataclasses.asdict(config)


def model_config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration that `model_config_to_json` gave.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    return _build(ModelConfig, data, "model config")


def _build(kind: Any, data: Mapping[str, Any], what: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ValueError(f"{what}: unknown field {unknown[0][:200]!r}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(data[name], str(field.type), f"{what}: {name}")
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{what}: {name!r} is missing")
    return kind(**values)


def _convert(value: Any, annotation: str, what: str) -> Any:
    """One field's value, checked against its annotation."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind == "RopeScaling" and isinstance(value, Mapping):
        return _build(RopeScaling, value, what)
    if kind.startswith("tuple[") and isinstance(value, list | tuple):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_convert(one, item, what) for one in value)
    # JSON writes 10000.0 and 10000 alike in some tools; a bool is no number.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    scalars: dict[str, tuple[bool, Callable[[Any], Any]]] = {
        "str": (isinstance(value, str), str),
        "bool": (isinstance(value, bool), bool),
        "int": (number and isinstance(value, int), int),
        "float": (number, float),
    }
    fits, convert = scalars.get(kind, (False, str))
    if not fits:
        raise ValueError(f"{what} is {str(value)[:200]!r}, not {annotation}")
    return convert(value)
