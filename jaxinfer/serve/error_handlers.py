"""Exceptions of the endpoints as answers, bodies that do not fit among them."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.engine.errors import EngineError
from jaxinfer.serve.bodies import BODIES
from jaxinfer.serve.errors import ApiError, api_error, error_response
from jaxinfer.serve.fields import Accepted, Note, Refused, notes

logger = logging.getLogger("jaxinfer.serve")

# What pydantic puts into the path of a value for the alternative of a union that it tried.
_ALTERNATIVE = re.compile(r"str|int|float|bool|none|(list|dict|tuple|union|literal|function)\b.*")


def validation_error(error: RequestValidationError, known: Mapping[str, Note]) -> ApiError:
    """The first thing wrong with a body, in words; `known` maps the endpoint's fields to their notes."""
    errors = error.errors()
    first, kind = errors[0], errors[0]["type"]
    location = _location(first)
    param = _path(location)
    num_others = len({_path(_location(each)) for each in errors} - {param})
    more = f" ({num_others} more of the body's fields are wrong)" if num_others else ""
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not location:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(location[-1]), list(known), 1) if len(location) == 1 else []
        remedy = f"did you mean {close[0]}?" if close else "remove it"
        return ApiError(400, f"{param}: no such field; {remedy}{more}", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is missing{more}", param=param, code="missing_required_parameter")
    note = known.get(str(location[0]))
    if isinstance(note, Refused):
        return ApiError(400, f"{param}: {note.refusal}{more}", param=param, code="unsupported_parameter")
    wanted = dict.fromkeys(each["msg"].removeprefix("Input ") for each in errors if _path(_location(each)) == param)
    text = f"{param}: {', or '.join(wanted)}, not {first['input']!r:.60}"
    if isinstance(note, Accepted):
        return ApiError(400, f"{text}: {note.why}{more}", param=param, code="unsupported_value")
    return ApiError(400, text + more, param=param, code="invalid_type")


def _location(error: Any) -> list[Any]:
    """Where in the body an error is, without the alternatives of unions on the way."""
    parts = list(error["loc"])[1:]
    return [
        part
        for index, part in enumerate(parts)
        if not index or isinstance(part, int) or not _ALTERNATIVE.fullmatch(part)
    ]


def _path(location: Sequence[Any]) -> str:
    """`messages[0].role` of ("messages", 0, "role")."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path[:200]


def _notes_of(request: Request) -> Mapping[str, Note]:
    body = BODIES.get(request.url.path)
    return {} if body is None else notes(body)


def install(app: FastAPI) -> None:
    """Have every error of the app answered in the API's shape."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, request.scope)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error, _notes_of(request)), request.scope)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"{request.method} {request.url.path!r:.100} is no endpoint of this server",
            405: f"{request.url.path!r:.100} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        answer = ApiError(error.status_code, message, headers=error.headers)
        return error_response(answer, request.scope)

    async def on_value_error(request: Request, error: Exception) -> Response:
        return error_response(api_error(error, list(_notes_of(request))), request.scope)

    async def on_exception(request: Request, error: Exception) -> Response:
        record = request.scope.get("state", {}).get("record")
        request_id = "-" if record is None else record.request_id
        logger.error("%s %s failed, request %s", request.method, request.url.path, request_id, exc_info=error)
        answer = error_response(api_error(error), request.scope)
        # What no other handler takes is answered outside of the middleware that gives answers their ids.
        answer.headers["x-request-id"] = request_id
        return answer

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ValueError, on_value_error)
    app.add_exception_handler(EngineError, on_exception)
    app.add_exception_handler(Exception, on_exception)


class Answered:
    """Ends exceptions that have been answered, which Starlette raises again: the connection may go on then.

    Those that come in the middle of an answer go on to the HTTP server, which closes the connection.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if not complete:
                raise
