"""What every request passes first: who asks, and how much they send. Plain ASGI, so that streams stay streams."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.serve.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a body."""


class Authentication:
    """Lets in who has one of the keys, as `Authorization: Bearer` or `x-api-key`; notes the key's owner.

    Probes need none, nor do the paths of `open_paths`.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str], open_paths: frozenset[str] = frozenset()):
        self._app = app
        self._owners = [(_digest(key), owner) for key, owner in keys.items()]
        self._open = OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        preflight = scope.get("method") == "OPTIONS"
        if scope["type"] == "http" and scope["path"] not in self._open and not preflight:
            owner = self._owner_of(Headers(scope=scope))
            if owner is None:
                error = ApiError(
                    401,
                    "a valid API key is needed, as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["key_owner"] = owner
        await self._app(scope, receive, send)

    def _owner_of(self, headers: Headers) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given, found = _digest(key.strip()), None
        for digest, owner in self._owners:  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, given):
                found = owner
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies beyond a size: by their declared length, or once so much has come; and ones that never end.

    The whole body is read here, so that what is too large can still be answered.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, others: Mapping[str, int] | None = None):
        self._app = app
        self._max_bytes = max_bytes
        self._others = others or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
            await self._app(scope, receive, send)
            return
        most = self._others.get(scope["path"], self._max_bytes)
        try:
            body = await self._read(scope, receive, most)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, most: int) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes; send less at a time", headers={"Connection": "close"})
