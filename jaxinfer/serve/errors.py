"""Errors as clients of the OpenAI API read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from jaxinfer.engine.errors import EngineDeadError, EngineError
from jaxinfer.serve.anthropic.errors import error_body, is_messages_path
from jaxinfer.tokenizer.messages import FieldError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_SHOWN_CHARACTERS = 2000


class ApiError(Exception):
    """What a request is answered with in place of a result.

    `param` names the field at fault, `code` the kind of fault for programs; `type` follows from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:_SHOWN_CHARACTERS]
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error in the shape of the OpenAI API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def api_error(error: BaseException, fields: Sequence[str] = ()) -> ApiError:
    """What a client is told of an exception: all of a `ValueError`, which is about what it sent; else no internals.

    `fields` are the names that may be the param: the one that the message begins with is taken.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has failed and cannot go on; restart the server", code="engine_dead")
    if isinstance(error, FieldError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, ValueError | TypeError):
        name = re.match(r"\w+", str(error))
        param = name.group() if name and name.group() in fields else None
        return ApiError(400, str(error), param=param)
    if isinstance(error, EngineError):
        return ApiError(500, "the step that ran this request failed; it may be repeated", code="step_failed")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as the clients of the path's API read it."""
    if not is_messages_path(scope["path"]):
        return JSONResponse(error.body, error.status, error.headers)
    record = scope.get("state", {}).get("record")
    request_id = record.request_id if record is not None else None
    return JSONResponse(error_body(error.status, error.message, request_id), error.status, error.headers)
