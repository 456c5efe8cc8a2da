"""The form that an output must have, in the spellings of the OpenAI API and of vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.fields import Body
from jaxinfer.structured.params import StructuredOutputsParams


class JsonSchema(Body):
    """`response_format.json_schema`: the schema and its name."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    name: str
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    description: str | None = None
    strict: Annotated[bool | None, Field(description="every schema is held to, so this changes nothing")] = None


class ResponseFormat(Body):
    """`response_format`: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """`structured_outputs`, as vLLM's: one of the first five."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def of(body: Any) -> StructuredOutputsParams | None:
    """What a body asks for; None where any text may come.

    Raises:
        ApiError: two of the fields ask, or one of them for what cannot be had.
    """
    asking = [name for name in _FIELDS if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type == "text":
        asking.remove("response_format")
        if body.response_format.json_schema is not None:
            raise _error("response_format", "json_schema belongs to type 'json_schema'")
    if len(asking) > 1:
        raise _error(asking[1], f"{asking[0]} says what form the output has; give one of them")
    if not asking:
        return None
    with named(body):
        return _params(asking[0], getattr(body, asking[0]))


def _params(field: str, value: Any) -> StructuredOutputsParams:
    if isinstance(value, ResponseFormat):
        if value.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if value.json_schema is None:
            raise _error("response_format", "type 'json_schema' needs json_schema: {name, schema}")
        schema = value.json_schema.schema_
        return StructuredOutputsParams(json={} if schema is None else schema)
    if isinstance(value, StructuredOutputs):
        given = {name: each for name, each in value.model_dump(by_alias=True).items() if each is not None}
        return StructuredOutputsParams(**given)
    return StructuredOutputsParams(**{field.removeprefix("guided_"): value})


@contextmanager
def named(body: Any) -> Iterator[None]:
    """Errors in the form that a body asks for name the field that asks."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"structured_outputs(?:\.\w+)?:? *", str(error))
        asking = next((name for name in _FIELDS if getattr(body, name, None) is not None), None)
        if found is None or asking is None:
            raise
        raise _error(asking, str(error)[found.end() :]) from None


def _error(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="invalid_form")
