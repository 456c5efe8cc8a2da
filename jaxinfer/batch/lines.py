"""Lines in the OpenAI batch format: the fields of their bodies as a job takes them, with the server's meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxinfer.batch.fields import ARRAYS
from jaxinfer.jobs.records import check
from jaxinfer.request import MAX_LOGPROBS, SamplingParams
from jaxinfer.structured.forms import FORM_FIELDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_SAMPLING = frozenset(each.name for each in fields(SamplingParams)) - {"logprobs", *ARRAYS}
_OF_URL = {
    COMPLETIONS: frozenset(("prompt", "logprobs", "add_special_tokens")),
    CHAT: frozenset(
        ("messages", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs")
        + ("add_generation_prompt", "continue_final_message")
    ),
}
# Values that ask for nothing, of fields that clients write into every body.
_ASKING_NOTHING: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "service_tier": ("auto", "default"),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
}
_REFUSALS = {
    "stream": "a job's results come whole; leave it out",
    "tools": "a job's results are text, without calls of functions; ask the server for them",
    "tool_choice": "a job's results are text, without calls of functions; ask the server for them",
    "user": "a job shares nothing among users; leave it out",
}


def is_line(given: Mapping[str, Any]) -> bool:
    """Whether a record is a request in the OpenAI batch format."""
    return "custom_id" in given and "body" in given and ("method" in given or isinstance(given["body"], Mapping))


def read_line(given: Mapping[str, Any], model_names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The url of a line and the fields of its body that are not null, each of them one that a job honours.

    Raises:
        ValueError: the line is no request, or asks for what a job does not have, by name.
    """
    record = check(dict(given))
    if record.url not in _OF_URL:
        raise ValueError(f"url={record.url!r:.60}: a job answers {' and '.join(_OF_URL)}")
    body = {name: value for name, value in record.body.items() if value is not None}
    _check_model(body.pop("model", None), model_names)
    known = _SAMPLING | _OF_URL[record.url] | set(FORM_FIELDS)
    for name in sorted(set(body) - known, key=str):
        if name != "metadata" and body[name] not in _ASKING_NOTHING.get(name, ()):
            why = _REFUSALS.get(name, f"a job has no such field of {record.url}; leave it out")
            raise ValueError(f"body.{name:.60}: {why}")
    return record.url, {name: value for name, value in body.items() if name in known}


def _check_model(name: Any, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        here = f"this job's is {', '.join(known)}" if known else "this job's has no name"
        raise ValueError(f"body.model={name!r:.100}: {here}; --served-model-name has lines call it otherwise")


def sampling_fields(url: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a body from `read_line`, for over the job's own, `defaults`; a None is meant.

    A chat completion has as many tokens as the context holds unless it or the job says fewer.

    Raises:
        ValueError: fields out of their range, or that do not go together.
    """
    found = {name: value for name, value in body.items() if name in _SAMPLING}
    if url == COMPLETIONS:
        return found | {name: body[name] for name in ("logprobs",) if name in body}
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    found["max_tokens"] = most = body.get(name, defaults.get("max_tokens"))
    if name in body and (type(most) is not int or most < 1):
        raise ValueError(f"body.{name}={most!r:.60} must be a whole number from 1 up")
    if "logprobs" in body or "top_logprobs" in body:
        found["logprobs"] = _chat_logprobs(body.get("logprobs"), body.get("top_logprobs"))
    return found


def _chat_logprobs(asked: Any, top: Any) -> int | None:
    if asked is not None and not isinstance(asked, bool):
        raise ValueError(f"body.logprobs={asked!r:.60} must be true or false")
    if top is not None and not asked:
        raise ValueError("body.top_logprobs needs logprobs: true")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
        raise ValueError(f"body.top_logprobs={top!r:.60} must be a whole number from 0 up to {MAX_LOGPROBS}")
    return (top or 0) if asked else None
