"""A server that answers as OpenAI's does, with delays and faults that the request itself asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

web = pytest.importorskip("aiohttp.web")


class FakeServer:
    """In a thread of its own. `bodies` are the requests it got, `most_at_once` how many were under way together.

    A request's `fake` is an object: `first_ms`, `gap_ms`, and `fault`, the name of what goes wrong.
    """

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.most_at_once = 0
        self._running = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def serve() -> None:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_post("/v1/chat/completions", self._complete)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            await stop.wait()
            await runner.cleanup()
            rest = asyncio.all_tasks() - {asyncio.current_task()}  # handlers whose client has gone
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(60)
        try:
            yield self.url
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _models(self, request: Any) -> Any:
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def _complete(self, request: Any) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._answer(request, body, body.get("fake") or {})
        finally:
            self._running -= 1

    async def _answer(self, request: Any, body: dict, fake: dict) -> Any:
        fault = fake.get("fault")
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "no room", "type": "overloaded"}}, status=fault)
        if fault == "hang":
            await asyncio.sleep(30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat, num = "messages" in body, body.get("max_tokens", 4)
        await asyncio.sleep(fake.get("first_ms", 0) / 1e3)
        if is_chat:
            await _event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(num):
            if index:
                await asyncio.sleep(fake.get("gap_ms", 0) / 1e3)
            if index == num // 2 and await _break(request, response, fault):
                return response
            text = f" {index}"
            choice: dict = {"delta": {"content": text}} if is_chat else {"text": text}
            if body.get("logprobs"):
                tokens = [{"token": text}] if is_chat else [text]
                choice["logprobs"] = {"content": tokens} if is_chat else {"tokens": tokens}
            if fault == "lost logprobs" and index == 0:
                choice.pop("logprobs")
            last = index == num - 1 and fault != "no finish_reason"
            choice |= {"index": 0, "finish_reason": "length" if last else None}
            await _event(response, {"choices": [choice]})
        await self._end(response, body, fault, num)
        return response

    async def _end(self, response: Any, body: dict, fault: str | None, num: int) -> None:
        prompt = body.get("prompt")
        num_prompt = len(prompt) if isinstance(prompt, list) else 7
        usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num}
        wrong = {
            "lost prompt token": {"prompt_tokens": num_prompt - 1},
            "too few in usage": {"completion_tokens": 1},
            "too many in usage": {"completion_tokens": num + 1},
            "one short": {"completion_tokens": num - 1},
        }
        usage |= wrong.get(str(fault), {})
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"] + (fault == "wrong sum")
        if fault == "text in usage":
            usage["completion_tokens"] = str(num)
        if body["stream_options"]["include_usage"] and fault != "no usage":
            await _event(response, {"choices": [], "usage": usage})
        if fault != "no done":
            await response.write(b"data: [DONE]\n\n")
        if fault == "data after done":
            await _event(response, {"choices": []})
        await response.write_eof()


async def _event(response: Any, content: dict) -> None:
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


async def _break(request: Any, response: Any, fault: str | None) -> bool:
    """Do what ends a stream in its middle; whether it did."""
    if fault == "disconnect":
        assert request.transport is not None
        request.transport.close()
    elif fault == "half an event":
        await response.write(b'data: {"choices": [{"te')
        await response.write_eof()
    elif fault == "bad json":
        await response.write(b'data: {"choices": [{"te\n\n')
        await response.write_eof()
    elif fault == "error event":
        await response.write(b'data: {"error": {"message": "the step failed"}}\n\n')
        await response.write_eof()
    else:
        return False
    return True


@pytest.fixture(scope="session")
def running() -> Iterator[FakeServer]:
    server = FakeServer()
    with server.running():
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    """The fake server, which remembers nothing."""
    running.bodies.clear()
    running.headers.clear()
    running.most_at_once = 0
    return running
