"""`/v1/responses` and what is kept of it."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from jaxinfer.serve import params, prompts
from jaxinfer.serve.chat import open_chat
from jaxinfer.serve.checks import renamed, wrong
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.forms import JsonSchema, ResponseFormat
from jaxinfer.serve.responses.conversation import (
    check_calls,
    messages_of,
    read_input,
    turn_starts,
    without_turns_before,
)
from jaxinfer.serve.responses.schemas import LOGPROBS, ResponsesRequest
from jaxinfer.serve.responses.store import Item, StoredResponse
from jaxinfer.serve.responses.tools import tool_use_of
from jaxinfer.serve.responses.writer import Writer
from jaxinfer.serve.schemas import ChatRequest
from jaxinfer.serve.segments import SegmentReader
from jaxinfer.serve.server import Call, Server, finals
from jaxinfer.serve.sse import EventStream, answer, dumps
from jaxinfer.serve.tools.definitions import ToolUse
from jaxinfer.tokenizer.messages import FieldError

router = APIRouter()

_RENAMED = partial(renamed, {"response_format": "text.format"})


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a text or a conversation, or go on with an earlier one."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    owner = _owner(request)
    use = tool_use_of(body)
    items = read_input(body.input)
    size_bytes = len(dumps(items))
    if body.previous_response_id is not None:
        previous = _stored(server, owner, body.previous_response_id, "previous_response_id")
        items = [*previous.items, *items]
        size_bytes += previous.size_bytes
    check_calls(items)
    if body.store and not server.responses.fits(size_bytes):
        raise ApiError(
            400, f"store: this server keeps {server.responses.max_bytes} bytes of responses at most", param="store"
        )
    chat = _chat(body)
    with _RENAMED():
        sampling = params.of_chat(server, chat)
    ids = await _encode(server, body, chat, use, items)
    call = replace(Call.of(request, chat, "resp"), id=f"resp_{uuid.uuid4().hex}")
    with _RENAMED():
        generation = await open_chat(server, call, chat, sampling, use, ids)

    def keep(response: dict[str, Any]) -> bool:
        stored = StoredResponse(response, tuple(items), size_bytes + len(dumps(response)))
        fits = body.store is not False and server.responses.fits(stored.size_bytes)
        if fits:
            server.responses.put(owner, stored)
        return fits

    reader = SegmentReader(server.dialect.reader(use, ids), exact=bool(use.names))
    writer = Writer(server, call, body, chat, sampling, reader, keep)
    if body.stream:
        timeout_s = server.config.stream_timeout_s
        return EventStream(writer.events(generation), generation.close, timeout_s, writer.failed)
    (output,) = await finals(request, generation)
    return answer(await writer.whole(output))


def _chat(body: ResponsesRequest) -> ChatRequest:
    """The request as one for a chat completion, its messages apart."""
    asks = LOGPROBS in (body.include or ())
    if body.top_logprobs and not asks:
        raise ApiError(400, f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
    return ChatRequest(
        messages=[],
        stream=body.stream,
        stop=body.stop,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_response_format(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=asks or None,
        top_logprobs=body.top_logprobs if asks else None,
        user=body.user,
        safety_identifier=body.safety_identifier,
        **body.extensions,
    )


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    schema = form.model_dump(exclude={"type"}, exclude_none=True)
    if form.type != "json_schema":
        for name in schema:
            raise wrong(f"text.format.{name}", "belongs to type 'json_schema'")
        return ResponseFormat(type=form.type)
    for name in ("name", "schema"):
        if name not in schema:
            raise wrong(f"text.format.{name}", "is missing", code="missing_required_parameter")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(**schema))


async def _encode(
    server: Server, body: ResponsesRequest, chat: ChatRequest, use: ToolUse, items: list[Item]
) -> list[int]:
    """The conversation's token ids; with truncation "auto" those of as many of its last turns as leave room.

    Room is `max_output_tokens`, where those are given and no more than a quarter of the context, else that quarter.

    Raises:
        ApiError: it is too long.
    """

    async def render(kept: list[Item]) -> list[int]:
        asked = chat.model_copy(update={"messages": messages_of(body.instructions, kept)})
        try:
            return await server.llm.encode(partial(prompts.render, server, asked, use))
        except FieldError as error:  # of a kept answer, as items of the body have been checked
            raise wrong("input", str(error)) from None

    ids = await render(items)
    most = server.max_model_len - min(body.max_output_tokens or server.max_model_len, server.max_model_len // 4)
    if body.truncation == "auto" and len(ids) > most:
        starts = turn_starts(items)
        low, high = 0, len(starts)
        while low < high:  # the fewest turns to leave out
            middle = (low + high) // 2
            ids = await render(without_turns_before(items, starts[middle]))
            low, high = (middle + 1, high) if len(ids) > most else (low, middle)
        if starts:
            ids = await render(without_turns_before(items, starts[min(low, len(starts) - 1)]))
    return prompts.checked(server, ids, "input")


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """A kept answer, as it was given."""
    stored = _stored(request.app.state.server, _owner(request), response_id)
    _check_queries(request, stored)
    return answer(stored.response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget an answer. Those that went on from it stay."""
    server: Server = request.app.state.server
    _stored(server, _owner(request), response_id)
    server.responses.remove(_owner(request), response_id)
    return answer({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: int = Query(20, ge=1, le=100),
    order: str = Query("desc", pattern="^(asc|desc)$"),
    after: str | None = None,
) -> Response:
    """What an answer was made from, earlier turns too: the newest first, unless `order` is "asc"."""
    stored = _stored(request.app.state.server, _owner(request), response_id)
    _check_queries(request, stored)
    items = list(stored.input_items if order == "asc" else reversed(stored.input_items))
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(404, f"after: {after!r:.100} is none of this response's items", param="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return answer({"object": "list", "data": data, **ends, "has_more": len(items) > limit})


def _owner(request: Request) -> str:
    """Whose answers a request may see: those of its API key's owner; all of them where no key is needed."""
    return getattr(request.state, "key_owner", None) or ""


def _stored(server: Server, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
    stored = server.responses.get(owner, response_id)
    if stored is None:
        raise ApiError(
            404,
            f"response {response_id!r:.100} is not kept here: it never was, was deleted, or had to make room",
            param=param,
            code="previous_response_not_found" if param == "previous_response_id" else "response_not_found",
        )
    return stored


def _check_queries(request: Request, stored: StoredResponse) -> None:
    """Raise `ApiError` for what a query asks that a kept answer does not give."""
    query = request.query_params
    for name in ("stream", "include_obfuscation"):
        if query.get(name, "false").lower() not in ("false", "0", ""):
            raise ApiError(400, f"{name}: a kept response is given whole", param=name)
    if "starting_after" in query:
        raise ApiError(400, "starting_after: a kept response is given whole", param="starting_after")
    for asked in [*query.getlist("include"), *query.getlist("include[]")]:
        has = any(part.get("logprobs") for item in stored.response["output"] for part in item.get("content", ()))
        if asked != LOGPROBS or not has:
            raise ApiError(400, f"include: {asked!r:.60} was not asked for when this was made", param="include")
