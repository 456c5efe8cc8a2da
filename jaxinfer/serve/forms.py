"""The form that an output must have, in the spellings of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.fields import Body
from jaxinfer.structured.forms import FORM_FIELDS, FormError, form_of, reason
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


def of(body: Any) -> StructuredOutputsParams | None:
    """What a body asks for; None where any text may come.

    Raises:
        ApiError: two of the fields ask, or one of them for what cannot be had.
    """
    given = {name: getattr(body, name) for name in FORM_FIELDS}
    dumped = {
        name: value.model_dump(by_alias=True) if isinstance(value, Body) else value for name, value in given.items()
    }
    try:
        return form_of(dumped)
    except FormError as error:
        raise _error(error.field, error.why) from None


@contextmanager
def named(body: Any) -> Iterator[None]:
    """Errors in the form that a body asks for name the field that asks."""
    try:
        yield
    except ValueError as error:
        why = reason(error)
        asking = next((name for name in FORM_FIELDS if getattr(body, name, None) is not None), None)
        if why is None or asking is None:
            raise
        raise _error(asking, why) from None


def _error(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="invalid_form")
