"""The table of request fields: each field of each body says where it is enforced, accepted as it is, or refused.

The notes stand in the bodies' annotations (`jaxinfer.serve.schemas`), so that a field without one cannot exist: a test
walks `table()` and checks each by its effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A request's body: unknown fields and values of other types than declared are refused; null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
