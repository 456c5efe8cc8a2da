"""Sampling parameters from a body: what it sets, over what the model recommends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from jaxinfer.request import MAX_LOGPROBS, SamplingParams
from jaxinfer.serve import forms
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.schemas import ChatRequest, CompletionRequest, GenerationBody
from jaxinfer.serve.server import Server
from jaxinfer.serve.tools.definitions import ToolUse
from jaxinfer.structured.grammar import spaced_schema
from jaxinfer.structured.params import StructuredOutputsParams

_NAMES = frozenset(field.name for field in fields(SamplingParams)) - {"logprobs", "structured_outputs"}


def _given(server: Server, body: GenerationBody) -> dict[str, Any]:
    set_here = {name: getattr(body, name) for name in type(body).model_fields if name in _NAMES}
    set_here["structured_outputs"] = forms.of(body)
    if body.logit_bias is not None:
        set_here["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return {**server.llm.default_sampling_fields, **{k: v for k, v in set_here.items() if v is not None}}


def _token_id(key: str) -> int:
    """JSON has no keys but strings."""
    if not key.isdecimal() or len(key) > 10:
        raise ApiError(400, f"logit_bias: {key!r:.40} is no token id", param="logit_bias")
    return int(key)


def of_completion(server: Server, body: CompletionRequest) -> SamplingParams:
    """Parameters of a completion: 16 tokens unless it says more, as in the OpenAI API.

    Raises:
        ValueError: a field out of its range.
        ApiError: fields that do not go together.
    """
    check_stream_options(body)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: echo with logprobs gives them already; drop one", param="prompt_logprobs")
    values = {"max_tokens": 16, **_given(server, body), "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    return SamplingParams(**values)


def of_chat(server: Server, body: ChatRequest) -> SamplingParams:
    """Parameters of a chat completion: as many tokens as the context holds unless it says fewer; raises the same."""
    check_stream_options(body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs={body.top_logprobs} must be from 0 up to {MAX_LOGPROBS}", param="top_logprobs"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if most is not None and most < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise ApiError(400, f"{name}={most} must be at least 1", param=name)
    return SamplingParams(**{**_given(server, body), "max_tokens": most, "logprobs": logprobs})


def with_calls(
    server: Server, body: ChatRequest, params: SamplingParams, use: ToolUse, prompt_ids: list[int]
) -> SamplingParams:
    """The parameters under one grammar for what may come of reasoning, calls and content of a form; else as they are.

    Special tokens are kept in the text where the parsers look for them, unless the body leaves them out.

    Raises:
        ApiError: the form cannot stand in one grammar with calls or after reasoning.
        FieldError: a function's schema cannot be enforced.
    """
    form = params.structured_outputs
    if body.skip_special_tokens is None and server.dialect.has_special_marks(use):
        params = replace(params, skip_special_tokens=False)
    with forms.named(body):
        schema = None if form is None else spaced_schema(form)
        if form is not None and schema is None and server.dialect.reasoning(prompt_ids) == "opened":
            raise ValueError(f"structured_outputs.{form.kind}: the model reasons first; only JSON can come after that")
    if form is not None and schema is None and use.names:
        raise ApiError(400, f"tools: calls and a {form.kind} for the content exclude each other", param="tools")
    with naming_tools(use, True):
        grammar = server.dialect.grammar(use, prompt_ids, schema)
        made = None if grammar is None else StructuredOutputsParams(grammar=grammar)
    return params if made is None else replace(params, structured_outputs=made)


@contextmanager
def naming_tools(use: ToolUse, is_made: bool) -> Iterator[None]:
    """Has what is wrong with a grammar that was made of tools told of the tools: the client has not written it."""
    try:
        yield
    except ValueError as error:
        _, found, why = str(error).partition("structured_outputs.grammar")
        if not found or not is_made or not use.names:
            raise
        why = f"tools: the functions' schemas together cannot be enforced: {why.lstrip(': ')}"
        raise ApiError(400, why, param="tools") from None


def check_stream_options(body: GenerationBody) -> None:
    """Raise `ApiError` for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
