"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.request import CompletionOutput, RequestOutput
from jaxinfer.serve import params, prompts
from jaxinfer.serve.anthropic.conversation import chat_of
from jaxinfer.serve.anthropic.errors import error_body
from jaxinfer.serve.anthropic.output import Blocks
from jaxinfer.serve.anthropic.schemas import CountTokensRequest, MessagesRequest
from jaxinfer.serve.anthropic.tools import tool_use_of
from jaxinfer.serve.chat import open_chat
from jaxinfer.serve.checks import renamed
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.forms import JsonSchema, ResponseFormat
from jaxinfer.serve.schemas import ChatRequest
from jaxinfer.serve.segments import SegmentReader
from jaxinfer.serve.server import Call, Generation, Server, finals
from jaxinfer.serve.sse import EventStream, answer, event
from jaxinfer.serve.tools.definitions import ToolUse
from jaxinfer.serve.usage import Usage

router = APIRouter()

_RENAMED = partial(renamed, {"response_format": "output_config.format"})


@router.post("/v1/messages")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, or go on with its last message where that is the assistant's."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    use = tool_use_of(body)
    chat = chat_of(
        body,
        stream=body.stream,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.metadata.user_id if body.metadata is not None else None,
        response_format=_response_format(body),
        **body.extensions,
    )
    with _RENAMED():
        sampling = params.of_chat(server, chat)
    ids = prompts.checked(server, await _encode(server, chat, use), "messages")
    call = replace(Call.of(request, chat, "msg"), id=f"msg_{uuid.uuid4().hex}")
    with _RENAMED():
        generation = await open_chat(server, call, chat, sampling, use, ids)
    reader = SegmentReader(server.dialect.reader(use, ids), exact=bool(use.names))
    writer = _Writer(server, call, body, reader)
    if body.stream:
        return EventStream(writer.events(generation), generation.close, server.config.stream_timeout_s, _failed)
    (output,) = await finals(request, generation)
    return answer(await writer.whole(output))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """How many tokens the prompt of a request has; cached ones too."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    return answer({"input_tokens": len(await _encode(server, chat_of(body), tool_use_of(body)))})


def _response_format(body: MessagesRequest) -> ResponseFormat | None:
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return None
    schema = JsonSchema.model_validate({"name": "output", "schema": form.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


async def _encode(server: Server, chat: ChatRequest, use: ToolUse) -> list[int]:
    return await server.llm.encode(partial(prompts.render, server, chat, use))


def _failed(error: ApiError) -> bytes:
    return event(error_body(error.status, error.message, None), "error")


class _Writer:
    """Answers one request."""

    def __init__(self, server: Server, call: Call, body: MessagesRequest, reader: SegmentReader):
        self._server = server
        self._call = call
        self._body = body
        self._usage = Usage(1)
        self._reader = reader
        self._blocks = Blocks()

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.add(0, output)
        (choice,) = output.outputs
        segments = await asyncio.to_thread(self._reader.add, choice.text)
        for _ in (*self._blocks.add([*segments, *self._reader.finish()]), *self._blocks.finish()):
            pass
        return {**self._message(), **self._ending(choice)}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Begins with the first output, since the first event tells how much of the prompt was cached."""
        begun = False
        async for _, output in generation.outputs():
            self._usage.add(0, output)
            (choice,) = output.outputs
            if not begun:
                begun = True
                yield _event({"type": "message_start", "message": self._message()})
                yield _event({"type": "ping"})
            for told in self._blocks.add(self._reader.add(choice.text)):
                yield _event(told)
            if choice.finish_reason is not None:
                for told in (*self._blocks.add(self._reader.finish()), *self._blocks.finish()):
                    yield _event(told)
                ending = self._ending(choice)
                yield _event({"type": "message_delta", "delta": ending, "usage": self._told_usage()})
                yield _event({"type": "message_stop"})

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._server.model_name,
            "content": list(self._blocks.content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._told_usage(),
        }

    def _told_usage(self) -> dict[str, Any]:
        """Tokens of the prompt are either read from the cache or input; writing to it costs nothing here."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
        }

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        """Why it ended. Raises `ApiError` where the API has no word for that."""
        if choice.finish_reason == "stop":
            if isinstance(choice.stop_reason, str):
                return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
            reason = "tool_use" if self._reader.num_calls else "end_turn"
            return {"stop_reason": reason, "stop_sequence": None}
        if choice.finish_reason == "length":
            full = self._usage.num_completion_tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if choice.finish_reason == "timeout":
            raise ApiError(504, "the request took longer than it may", code="timeout")
        raise ApiError(503, "the server is shutting down; ask another", code="aborted")


def _event(told: dict[str, Any]) -> bytes:
    return event(told, told["type"])
