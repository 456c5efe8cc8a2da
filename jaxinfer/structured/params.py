"""What a caller asks of an output's form. Imports nothing of the package: `request` stands on it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TEXT_CHARS = 128 * 1024  # of a schema, a grammar, or all choices together
MAX_REGEX_CHARS = 16 * 1024
MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output must have; exactly one of the first five. Names and meanings as in vLLM.

    json: a JSON schema (draft 2020-12), as a mapping or its text; kept as text.
    regex: a regular expression that the whole output matches: Rust's syntax, which is Python's without look-around and
        back-references; `\\d` is 0 to 9.
    choice: texts of which the output is one.
    grammar: a context-free grammar, in Lark's syntax as llguidance reads it, or in GBNF (`root ::= …`).
    json_object: any JSON object.
    disable_any_whitespace: of JSON: no whitespace between its parts.
    whitespace_pattern: of JSON: a regular expression for the whitespace between its parts, instead of up to 64
        characters of any.

    Raises:
        ValueError: none of the five or several, one of the wrong type or too long, text that is no JSON.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None) or (
                name != "json_object" and getattr(self, name) is None
            ):
                raise _error(name, f"{getattr(self, name)!r:.60} must be True or False")
        given = [
            name for name in _KINDS if getattr(self, name) not in (None, False) or (name, self.json) == ("json", False)
        ]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(_KINDS)}; {what} is given")
        for name, limit in (("regex", MAX_REGEX_CHARS), ("grammar", MAX_TEXT_CHARS), ("whitespace_pattern", 1024)):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text, limit)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _plain_choices(self.choice))
        if given[0] not in ("json", "json_object") and (self.disable_any_whitespace or self.whitespace_pattern):
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise _error(name, f"is of JSON only, and {given[0]} is given")
        if self.disable_any_whitespace and self.whitespace_pattern:
            raise _error("whitespace_pattern", "and disable_any_whitespace exclude each other")

    @property
    def kind(self) -> str:
        """The one that is given: "json", "regex", "choice", "grammar" or "json_object"."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def _error(name: str, why: str) -> ValueError:
    return ValueError(f"structured_outputs.{name} {why}")


def _check_text(name: str, text: Any, limit: int) -> None:
    if not isinstance(text, str) or not text:
        raise _error(name, f"{text!r:.60} must be a text that is not empty")
    if len(text) > limit:
        raise _error(name, f"has {len(text)} characters; {limit} is the most")
    if any("\ud800" <= character <= "\udfff" or character == "\0" for character in text):
        raise _error(name, "holds a lone surrogate or a NUL, which are no text")


def _schema_text(schema: Any) -> str:
    """A schema as JSON text, without what JSON does not know."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_TEXT_CHARS)
    try:
        schema = json_text.loads(schema) if isinstance(schema, str) else schema
        plain = dict(schema) if isinstance(schema, Mapping) else schema
        text = json_text.dumps(plain, allow_nan=False) if isinstance(plain, dict | bool) else ""
    except RecursionError:
        raise _error("json", "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _error("json", f"is no JSON: {error}") from None
    if not text:
        raise _error("json", f"{schema!r:.60} must be a JSON schema: an object, True or False")
    if len(text) > MAX_TEXT_CHARS:
        raise _error("json", f"has {len(text)} characters as JSON text; {MAX_TEXT_CHARS} is the most")
    return text


def _plain_choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise _error("choice", f"{choices!r:.60} must be a list of texts")
    if len(choices) > MAX_CHOICES:
        raise _error("choice", f"has {len(choices)} entries; {MAX_CHOICES} is the most")
    for text in choices:
        _check_text("choice", text, MAX_TEXT_CHARS)
    if sum(map(len, choices)) > MAX_TEXT_CHARS:
        raise _error("choice", f"has {sum(map(len, choices))} characters; {MAX_TEXT_CHARS} is the most")
    return tuple(choices)
