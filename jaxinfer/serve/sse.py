"""Answers that take a while: server-sent events, and whole ones, each given up when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.serve.errors import ApiError, api_error

logger = logging.getLogger("jaxinfer.serve")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection before its answer."""


def dumps(value: Any) -> bytes:
    """JSON in UTF-8, short. What is no Unicode, as half a surrogate pair from a client, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event, named or not."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return b"%sdata: %s\n\n" % (head, dumps(value))


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(dumps(value), status, headers, media_type="application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises `ClientGone` then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events.

    Events are made as fast as the client reads them. When it goes, or leaves them unread for `stall_timeout_s`, the
    generator is closed. An exception in the generator becomes an event `make_error` of it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[object]],
        stall_timeout_s: float,
        make_error: Callable[[ApiError], bytes] = lambda error: event(error.body),
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._stall_timeout_s = stall_timeout_s
        self._make_error = make_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(pump, gone)
            await self._events.aclose()
            await self._close()

    async def _pump(self, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._stall_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for each in self._events:
                await write(each)
        except TimeoutError:
            logger.warning("a stream was left unread for %g s and is dropped", self._stall_timeout_s)
            return
        except Exception as error:
            told = api_error(error)
            if told.status >= 500:
                logger.error("a stream failed: %s", told.message, exc_info=error)
            await write(self._make_error(told))
        await write(b"", more=False)
