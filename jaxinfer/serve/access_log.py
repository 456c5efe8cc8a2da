"""The outermost middleware: a request id, one line a request in the log `jaxinfer.access`, its count and its trace.

Pure ASGI, so that bodies stream and disconnects reach the handlers as they come.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.serve.anthropic.errors import is_messages_path
from jaxinfer.serve.request_log import RequestRecord, as_json, as_text, request_id_of

logger = logging.getLogger("jaxinfer.access")

# What machines ask for all the time: written at level DEBUG, unless it failed.
QUIET = frozenset({"/health", "/ready", "/metrics", "/status", "/", "/page/{name}"})
FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {"text": as_text, "json": as_json}


def record_of(request: Request) -> RequestRecord:
    """The record of the request that is being answered, for a handler to fill in."""
    return request.scope["state"]["record"]


def log_to_stderr() -> None:
    """Have the access log's lines written as they are, beside the other logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False


class AccessLogMiddleware:
    """See the module.

    Args:
        log_format: "text" for key=value, "json" for a JSON object a line.
        log_prompts: whether lines hold the prompts.
        metrics: told of each request; see `ServerMetrics.answered`.
        tracer: makes a span of each request; see `jaxinfer.serve.tracing.Tracer`.
        paths: of the routes; what was answered before its route was looked for is counted under its path if it is one.

    Raises:
        ValueError: an unknown log_format.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        log_format: str = "text",
        log_prompts: bool = False,
        metrics: Any = None,
        tracer: Any = None,
        paths: frozenset[str] = frozenset(),
    ):
        if log_format not in FORMATS:
            raise ValueError(f"log_format={log_format!r} must be one of {', '.join(FORMATS)}")
        self.app = app
        self._format = FORMATS[log_format]
        self._log_prompts = log_prompts
        self._metrics = metrics
        self._tracer = tracer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")), request.method, scope["path"])
        scope.setdefault("state", {})["record"] = record
        span = self._tracer.start(request.headers) if self._tracer is not None else None
        start_s, complete = time.monotonic(), False

        async def receive_and_note() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                record.disconnected = True
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # The Messages API's clients read it by a name of its own.
                names = (b"x-request-id", b"request-id") if is_messages_path(record.path) else (b"x-request-id",)
                others = [each for each in message.get("headers", ()) if each[0].lower() not in names]
                headers = [(name, record.request_id.encode()) for name in names]
                message = {**message, "headers": [*others, *headers]}
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive_and_note, send_and_note)
        except BaseException as error:
            record.error = type(error).__name__
            raise
        finally:
            # An exception before any answer becomes a 500 outside; nginx's 499 is a client that left before it.
            record.status = record.status or (499 if record.disconnected else 500)
            record.duration_s = time.monotonic() - start_s
            known = record.path if record.path in self._paths else "other"
            record.route = getattr(scope.get("route"), "path", None) or known
            self._finish(record, span)

    def _finish(self, record: RequestRecord, span: Any) -> None:
        if self._metrics is not None:
            self._metrics.answered(record.method, record.route, record.status, record.duration_s)
        if span is not None:
            self._tracer.finish(span, record)
        level = logging.DEBUG if record.route in QUIET and record.status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self._format(record.fields(self._log_prompts)))
