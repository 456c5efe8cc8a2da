"""What every request passes first: who asks, and how much they send. Plain ASGI, so that streams stay streams."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.serve.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a body, or, of a file, each part of it."""
MAX_VALUES = 1 << 20
MAX_CONTAINERS = 1 << 18
"""Of the JSON of a body, whatever its size; those in its texts count too."""
HEARD_OUT_BYTES = 16 << 20
"""How much more than its limit a body may have for its client to be heard out, and so to read the answer."""
UPLOAD_TIMEOUT_S = 3600.0
"""How long it may take to send a file."""


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
                await error_response(error, scope)(scope, receive, send)
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


class OtherPages:
    """Refuses what a browser sends for a page of another site, unless that is one of `allowed_origins`.

    Without CORS such a page reads no answer, yet a form of it would be stored as a file. Browsers say whose page asks
    (`Sec-Fetch-Site`, of the W3C's Fetch Metadata); other clients say nothing, and pass. With `only_local`, for a
    server on loopback, a page must also have come from a local name: one whose own name was made to mean this machine
    (DNS rebinding) counts as the same site.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Collection[str] = (), only_local: bool = False):
        self._app = app
        self._allowed = frozenset(allowed_origins)
        self._only_local = only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._refuses(scope, Headers(scope=scope)):
            error = ApiError(
                403, "pages of other sites may not use this server (--allowed-origins)", code="origin_not_allowed"
            )
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuses(self, scope: Scope, headers: Headers) -> bool:
        site, host = headers.get("sec-fetch-site"), headers.get("host", "")
        if "*" in self._allowed or headers.get("origin") in self._allowed:
            return False
        if site in ("cross-site", "same-site"):
            return scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if site != "same-origin" or not self._only_local:
            return False
        return f"{scope.get('scheme', 'http')}://{host}" not in self._allowed and not is_loopback(_without_port(host))


def is_loopback(host: str) -> bool:
    """Whether a host's name means this machine alone."""
    return host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")


def _without_port(host: str) -> str:
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies beyond a size, and ones that never end.

    The whole body is read here, so that what is too large can still be answered; of the paths in `streamed`, which have
    limits of their own, it is handed on as it comes, and what is wrong with it is raised where it is read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, streamed: Mapping[str, int] | None = None):
        self._app = app
        self._max_bytes = max_bytes
        self._streamed = streamed or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._streamed:
            await self._app(scope, _limited(scope, receive, self._streamed[scope["path"]]), send)
            return
        try:
            body = await self._read(scope, receive, self._max_bytes)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, most: int) -> bytes | None:
        """The body; None where the client has gone.

        Of one that is too large the rest is read and dropped, within bounds: a connection that is closed while its
        client sends is reset, and the answer may be lost with it.
        """
        _check_declared(scope, most + HEARD_OUT_BYTES, most)
        parts, size, more = [], 0, True
        num_values = num_containers = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more and size <= most + HEARD_OUT_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                        num_values += part.count(b",")
                        num_containers += part.count(b"[") + part.count(b"{")
                    else:
                        parts.clear()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        if size > most:
            raise _too_large(most)
        _check_values(num_values, num_containers)
        return b"".join(parts)


def _limited(scope: Scope, receive: Receive, most: int) -> Receive:
    """A body as it comes. Raises the 413 once it is too large, the 408 where nothing comes for too long."""
    size, end_s = 0, time.monotonic() + UPLOAD_TIMEOUT_S
    complete = False

    async def read() -> Message:
        nonlocal size, complete
        if complete:  # only the client's leaving is still to come, whenever that is
            return await receive()
        _check_declared(scope, most, most)
        try:
            async with asyncio.timeout(min(BODY_TIMEOUT_S, end_s - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > most:
            raise _too_large(most)
        return message

    return read


def _check_declared(scope: Scope, declared_most: int, most: int) -> None:
    """Raise the 413, which tells of `most`, for a body that is declared to be larger than `declared_most`."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and int(declared) > declared_most:
        raise _too_large(most)


def _check_values(num_values: int, num_containers: int) -> None:
    """Raise the 413 for JSON that would take long to read, which is done on the event loop, for its size."""
    if num_values > MAX_VALUES or num_containers > MAX_CONTAINERS:
        raise ApiError(
            413,
            f"the body has more than {MAX_VALUES} commas or {MAX_CONTAINERS} opening brackets; send less at a time",
        )


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes; send less at a time", headers={"Connection": "close"})
