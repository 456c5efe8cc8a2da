"""The outermost middleware around small ASGI applications: ids, one line a request, streams, disconnects, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from jaxinfer.serve.access_log import AccessLogMiddleware, record_of


class Counted:
    """Stands for `ServerMetrics`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def answered(self, method: str, path: str, status: int, duration_s: float | int) -> None:
        assert duration_s >= 0
        self.seen.append((method, path, status))


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/items/{name}")
    async def item(name: str, request: Request) -> dict[str, str]:
        record = record_of(request)
        record.model, record.prompt = "tiny", "secret words"
        return {"id": record.request_id}

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            for part in ("one ", "two ", "three"):
                yield part
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/fails")
    async def fails() -> None:
        raise KeyError("inside")

    return app


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="jaxinfer.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "jaxinfer.access"]


def get(path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        app = AccessLogMiddleware(make_app(), **{"log_format": "json", **settings})
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def test_one_line_a_request(lines) -> None:
    counted = Counted()
    answer = get("/items/7?key=secret", {"X-Request-Id": "mine-1"}, metrics=counted)
    assert answer.headers["x-request-id"] == "mine-1" and answer.json() == {"id": "mine-1"}
    (line,) = [json.loads(line) for line in lines()]
    assert line["request_id"] == "mine-1" and line["path"] == "/items/7" and line["status"] == 200
    assert line["model"] == "tiny" and "prompt" not in line
    assert "secret" not in json.dumps(line)
    assert counted.seen == [("GET", "/items/{name}", 200)]


def test_prompts_only_where_asked_for(lines) -> None:
    get("/items/7", log_prompts=True)
    assert json.loads(lines()[0])["prompt"] == "secret words"


def test_ids_are_made_and_differ() -> None:
    made = {get("/health", {"X-Request-Id": "not good!"}).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(len(each) == 32 for each in made)


def test_probes_are_quiet_and_unknown_paths_are_counted_together(lines) -> None:
    counted = Counted()
    get("/health", metrics=counted)
    get("/nowhere/1", metrics=counted)
    get("/nowhere/2", metrics=counted)
    assert [json.loads(line)["path"] for line in lines()] == ["/nowhere/1", "/nowhere/2"]
    assert counted.seen == [("GET", "/health", 200), ("GET", "other", 404), ("GET", "other", 404)]


def test_an_exception_is_logged_as_500(lines) -> None:
    assert get("/fails").status_code == 500
    line = json.loads(lines()[0])
    assert line["status"] == 500 and line["error"] == "KeyError" and "inside" not in json.dumps(line)


def test_text_format(lines) -> None:
    get("/items/7", log_format="text")
    assert " method=GET path=/items/7 status=200 " in lines()[0]


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="log_format='xml' must be one of text, json"):
        AccessLogMiddleware(make_app(), log_format="xml")


def call(app: AccessLogMiddleware, path: str, leave_after: int) -> list[dict[str, Any]]:
    """Messages that a client gets which leaves after so many of them."""
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        gone = asyncio.Event()
        given = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))
            if len(sent) >= leave_after:
                gone.set()
                await asyncio.sleep(0.05)

        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": ("test", 80),
            "scheme": "http",
            "root_path": "",
        }
        await app(scope, receive, send)

    asyncio.run(run())
    return sent


def test_a_stream_stays_a_stream(lines) -> None:
    sent = call(AccessLogMiddleware(make_app(), log_format="json"), "/stream", leave_after=99)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert bodies[:3] == [b"one ", b"two ", b"three"]
    assert "disconnected" not in json.loads(lines()[0])


def test_a_disconnect_reaches_the_handler_and_the_log(lines) -> None:
    sent = call(AccessLogMiddleware(make_app(), log_format="json"), "/stream", leave_after=2)
    assert b"three" not in [message.get("body") for message in sent]
    line = json.loads(lines()[0])
    assert line["disconnected"] is True and line["status"] == 200
