"""Errors as clients of the Messages API read them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Whether the clients of a path are the Messages API's."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """An error in the API's shape; its type follows from the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
