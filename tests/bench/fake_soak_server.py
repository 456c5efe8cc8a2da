"""A server that answers completions of token ids as ours does, with the faults that its command line names."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

from aiohttp import web

CAPACITY = 32


class Fake:
    def __init__(self, faults: set[str]):
        self.faults = faults
        self.num_running = 0
        self.num_requests = 0
        self.kept: list[Any] = []
        self.draining = False

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("/ready", "/health", "/status", "/openapi.json", "/metrics"):
            app.router.add_get(path, getattr(self, path.strip("/").split(".")[0]))
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/tokenize", self.tokenize)
        return app

    async def ready(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "num_failed_steps": int("failed step" in self.faults)})

    async def status(self, request: web.Request) -> web.Response:
        settings = {"max_model_len": 64, "vocab_size": 100}
        return web.json_response({"model": "fake", "settings": settings, "stats": {}})

    async def openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {"/v1/completions": {}}})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": 1})

    async def metrics(self, request: web.Request) -> web.Response:
        pages = self.num_running + ("pages" in self.faults and self.num_requests > 20)
        lines = [
            f'jaxinfer:num_requests_running{{model_name="fake"}} {self.num_running}',
            'jaxinfer:num_requests_waiting{model_name="fake"} 0.0',
            f'jaxinfer:pages_used{{model_name="fake"}} {pages}',
            'jaxinfer:http_requests_total{path="/x",status="500"} ' + ("1.0" if "hidden 500" in self.faults else "0.0"),
        ]
        return web.Response(text="# HELP no\n" + "\n".join(lines))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        self.keep()
        if "death" in self.faults and self.num_requests > 20:
            os._exit(7)
        body = await request.json()
        headers = {"X-Request-Id": request.headers["X-Request-Id"]}
        if not isinstance(body["prompt"], list):
            return web.json_response({}, headers=headers)
        if "no id" in self.faults:
            headers = {}
        if "500" in self.faults and self.num_requests % 7 == 0:
            return web.json_response({"error": {"message": "no", "type": "x", "param": None, "code": None}}, status=500)
        num = body.get("n", 1)
        if self.num_running + num > CAPACITY - ("place" in self.faults and self.num_requests > 20):
            retry = {} if "no retry-after" in self.faults else {"Retry-After": "1"}
            error = {"message": "full", "type": "x", "param": None, "code": "overloaded"}
            return web.json_response({"error": error}, status=429, headers=headers | retry)
        self.num_running += num
        try:
            return await self.answer(request, body, headers, num)
        finally:
            self.num_running -= num

    async def answer(self, request: web.Request, body: dict, headers: dict, num: int) -> web.StreamResponse:
        tokens = [(sum(body["prompt"]) + index) % 100 for index in range(body["max_tokens"])]
        if "other tokens" in self.faults and self.num_requests % 5 == 0:
            tokens[0] += 1
        for _ in tokens:
            await asyncio.sleep(0.002)
        if self.draining and "lost at the end" in self.faults:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        told = {"finish_reason": "length", "logprobs": None, "text": "x", "token_ids": tokens}
        choices = [{"index": index, **told} for index in range(num)]
        count = num * len(tokens) - ("miscounted" in self.faults)
        num_prompt = len(body["prompt"])
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        if not body.get("stream"):
            return web.json_response({"choices": choices, "usage": usage}, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        for choice in choices:
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if "no done" not in self.faults:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def keep(self) -> None:
        """Lose what the faults say."""
        if "memory" in self.faults:
            self.kept.append(b"x" * 500_000)
        if "files" in self.faults:
            self.kept.append(open(os.devnull))  # noqa: SIM115
        if "threads" in self.faults and self.num_requests % 4 == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()


async def serve(port: int, faults: set[str]) -> int:
    fake, ended = Fake(faults), asyncio.Event()
    runner = web.AppRunner(fake.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()

    def end() -> None:
        fake.draining = True
        ended.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await ended.wait()
    while fake.num_running:
        await asyncio.sleep(0.01)
    await runner.cleanup()
    if "traceback" in faults:
        print("Traceback (most recent call last):\n  SomeError", file=sys.stderr)
    return 3 if "exit" in faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--faults", default="")
    flags = parser.parse_args()
    code = asyncio.run(serve(flags.port, set(filter(None, flags.faults.split(",")))))
    sys.stdout.flush()
    os._exit(code)
