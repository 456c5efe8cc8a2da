"""Requests of batches: asked of the same endpoints as those that come over HTTP, while the engine has rows to spare."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from jaxinfer.serve.server import Server

logger = logging.getLogger("jaxinfer.serve")

_POLL_S = 0.02


async def ask(app: ASGIApp, path: str, body: dict[str, Any], owner: str) -> tuple[int, Any]:
    """Status and answer, as JSON values, of a POST that an owner of an API key makes; nobody where that is empty.

    Cancelling it ends the request.
    """
    content = json.dumps(body).encode()
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())],
        "client": None,
        "server": None,
        "state": {"offline": True, "key_owner": owner or None},
    }
    # The app raises again what it has answered with a 500, for servers to log.
    with contextlib.suppress(Exception):
        await app(scope, receive, send)
    if not sent:
        return 500, {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}}
    answer = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(answer)


class Places:
    """Lets requests of batches begin while rows of the engine are idle, in the order in which they ask.

    `limit` is how many there may be at once.
    """

    def __init__(self, server: Server, limit: int):
        self._server = server
        self._limit = limit
        self._turn = asyncio.Lock()
        self.num_taken = 0

    async def take(self) -> None:
        """Wait for a place; there is none once the server drains."""
        async with self._turn:
            while not self._has_one():
                await asyncio.sleep(_POLL_S)
            self.num_taken += 1

    def give_back(self) -> None:
        self.num_taken -= 1

    def _has_one(self) -> bool:
        admission = self._server.admission
        num_rows = self._server.llm.max_num_seqs - admission.num_sequences
        return not admission.draining and self.num_taken < min(self._limit, num_rows)
