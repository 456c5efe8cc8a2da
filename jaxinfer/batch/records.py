"""What a job reads and what it writes, whatever the files' formats. Imports nothing heavy."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class InputRecord:
    """One record of an input file.

    index: its place in the file, from 0; what cannot be read counts too.
    offset: of its first byte in the file, uncompressed; None where the format has none.
    fields: its features by name: lists of bytes, int or float of a `tf.train.Example`, else values as JSON has them.
    error: why it cannot be read, and None where it can.
    """

    index: int
    offset: int | None
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Choice:
    """One output of a request.

    logprobs: log-probability of each token, where they were asked for.
    top_logprobs: of each token's place, the likeliest tokens: pairs of id and log-probability, likeliest first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Result:
    """What came of one record: `choices`, or the `error` that kept it from having any.

    file, index: where it came from.
    fingerprint: of the model, the settings and the program that made it.
    num_prompt_tokens, num_output_tokens: the request's usage, of all choices that were made.
    prompt_logprobs, prompt_top_logprobs: as those of a choice, of the prompt's tokens, and None for the first.
    features: fields of the record that are copied to the output.
    """

    file: str
    index: int
    fingerprint: str
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    choices: tuple[Choice, ...] = ()
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None
    features: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, which `from_json` takes back; bytes are in base64. Its lists are the result's own."""
        # Not `asdict`, which copies every token and probability by itself.
        choices = [dict(vars(choice)) for choice in self.choices]
        return {**vars(self), "choices": choices, "features": _without_bytes(self.features)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Result:
        choices = tuple(
            Choice(**{**choice, "top_logprobs": _as_pairs(choice["top_logprobs"])}) for choice in found["choices"]
        )
        own = {
            "choices": choices,
            "prompt_top_logprobs": _as_pairs(found["prompt_top_logprobs"]),
            "features": _with_bytes(found["features"]),
        }
        return cls(**{**found, **own})


def _as_pairs(places: Any) -> Any:
    """JSON has no tuples."""
    if places is None:
        return None
    return [None if place is None else [tuple(pair) for pair in place] for place in places]


_BYTES = "\0bytes"  # no key of a file's own: names with NUL are refused where they are read


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: _without_bytes(each) for name, each in value.items()}
    return [_without_bytes(each) for each in value] if isinstance(value, list) else value


def _with_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        if _BYTES in value:
            return base64.b64decode(value[_BYTES])
        return {name: _with_bytes(each) for name, each in value.items()}
    return [_with_bytes(each) for each in value] if isinstance(value, list) else value


def size_of(value: Any) -> int:
    """About how many bytes a field's value, or all fields, have."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 8 * len(value) if not value or isinstance(value[0], int | float) else sum(map(size_of, value))
    return 8
