"""The table of request fields: each field of each body says where it is enforced, accepted as it is, or refused.

The notes stand in the bodies' annotations (`jaxinfer.serve.schemas`), so that a field without one cannot exist: a test
walks `table()` and checks each by its effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

MAX_KEYS = 256
"""Of an object whose keys, or values, are checked one by one: each that is wrong costs an error of its own."""


def _stop_early(schema: Any) -> None:
    """Have each list of a schema end with its first wrong entry."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for value in schema.values():
            _stop_early(value)
    elif isinstance(schema, list):
        for value in schema:
            _stop_early(value)


class Body(BaseModel):
    """A request's body: unknown fields and values of other types than declared are refused; null is absent.

    What is wrong is looked for no further than its first place in a list, and in objects of no more than `MAX_KEYS`
    unknown keys: a body of millions of wrong values must not hold up the server for as many errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_KEYS:
            raise PydanticCustomError("too_many_keys", "Input has {num} keys", {"num": len(given)})
        return given


def few_keys(given: Any) -> Any:
    """Raise `ValueError` for an object of more keys than any such field has a use for."""
    if isinstance(given, dict) and any(
        isinstance(each, dict) and len(each) > MAX_KEYS for each in (given, *given.values())
    ):
        raise ValueError(f"an object has more than {MAX_KEYS} keys")
    return given


def first_wrong(given: Any) -> Any:
    """Raise `ValueError` for the first value of an object that is no number; pydantic would tell of each."""
    for key, value in given.items() if isinstance(given, dict) else ():
        if type(value) not in (int, float):
            raise ValueError(f"{key!r:.60} must have a number")
    return given


@dataclass(frozen=True)
class Enforced:
    """The field has an effect; `where` says in which part."""

    where: str


@dataclass(frozen=True)
class Accepted:
    """The field is taken because unmodified clients send it, at values that ask for nothing; `why` nothing is done."""

    why: str


@dataclass(frozen=True)
class Refused:
    """A field of the API that this server does not have: only null is taken. `refusal` is what the client reads."""

    refusal: str


Note = Enforced | Accepted | Refused


@dataclass(frozen=True)
class Row:
    """One field of one endpoint's body."""

    endpoint: str
    field: str
    note: Note


@lru_cache(maxsize=256)
def notes(body: type[BaseModel]) -> dict[str, Note]:
    """The note of each field of a body. Raises `TypeError` for a field that has none, or several."""
    found: dict[str, Note] = {}
    for name, field in body.model_fields.items():
        own = [each for each in field.metadata if isinstance(each, Enforced | Accepted | Refused)]
        if len(own) != 1:
            raise TypeError(f"{body.__name__}.{name} has {len(own)} notes on where it is enforced; it needs one")
        found[field.alias or name] = own[0]
    return found


def table(bodies: Mapping[str, type[Body]]) -> list[Row]:
    """Every field of every endpoint, given the endpoints' bodies."""
    return [Row(endpoint, name, note) for endpoint, body in bodies.items() for name, note in notes(body).items()]
