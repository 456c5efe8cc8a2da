"""A real server on loopback around a tiny model, for the tests of all endpoints."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.waiting import is_idle, wait_until

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "checkpoints" / "tiny-llama")
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "verbose": False}
NAME = "tiny"


class Running:
    """A server that runs in a thread: its address, and a client for it."""

    def __init__(self, server: Any, uvicorn_server: Any, bound: socket.socket, loop: asyncio.AbstractEventLoop):
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self.bound = bound
        self.server = server
        self.uvicorn_server = uvicorn_server
        self.url = url
        self.loop = loop
        self.http = httpx.Client(base_url=url, timeout=60)
        self._clients: dict[tuple[Any, ...], Any] = {}

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def openai(self, api_key: str = "none") -> Any:
        from openai import OpenAI

        return self._client(OpenAI, f"{self.url}/v1", api_key)

    def anthropic(self, api_key: str = "none") -> Any:
        from anthropic import Anthropic

        return self._client(Anthropic, self.url, api_key)

    def _client(self, kind: Any, url: str, api_key: str) -> Any:
        """One of a kind and key: making one takes long, and one that is not closed warns."""
        client = self._clients.get((kind, api_key))
        if client is None:
            client = kind(base_url=url, api_key=api_key, max_retries=0, timeout=60)
            self._clients[kind, api_key] = client
        return client

    def close(self) -> None:
        for client in (self.http, *self._clients.values()):
            client.close()


@contextmanager
def running(llm: Any, tracer: Any = None, **settings: Any) -> Iterator[Running]:
    """Serve an `AsyncLLM` with settings of `ServerConfig` on a free port."""
    from jaxinfer.serve.config import ServerConfig
    from jaxinfer.serve.lifecycle import bind, make_uvicorn
    from jaxinfer.serve.server import Server

    config = ServerConfig(**{"port": 0, "stream_timeout_s": 60.0, "drain_timeout_s": 60.0, **settings})
    with bind(config) as bound:
        loop = asyncio.new_event_loop()
        made: list[Any] = []
        started = threading.Event()

        async def main() -> None:
            server = Server(llm, config, (NAME, "tiny-alias"))
            server.tracer = tracer
            uvicorn_server = make_uvicorn(server, bound)
            made.extend([server, uvicorn_server])
            serving = asyncio.ensure_future(uvicorn_server.serve(sockets=[bound]))
            while not uvicorn_server.started and not serving.done():
                await asyncio.sleep(0.01)
            started.set()
            await serving

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
        thread.start()
        assert started.wait(120)
        server, uvicorn_server = made
        found = Running(server, uvicorn_server, bound, loop)
        try:
            yield found
        finally:
            found.close()
            uvicorn_server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server did not end"
            loop.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """The tiny model's engine; wholly compiled, so that tests measure no compiling."""
    import jax.numpy as jnp

    from jaxinfer import AsyncLLM, LogitsProcessor

    def favour(logits, params):
        chosen = jnp.arange(logits.shape[-1])[None] == params["token"].astype(jnp.int32)[:, None]
        return logits + params["amount"][:, None] * chosen

    processors = [LogitsProcessor("favour", favour, {"token": 0, "amount": 0})]
    llm = AsyncLLM(TINY, logits_processors=processors, **ENGINE)
    asyncio.run(llm.wait_until_compiled())
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def runner() -> Any:
    """`running`, for servers around other engines, and for fixtures of a wider scope than `serving`."""
    return running


@pytest.fixture(scope="session")
def served(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the default settings, a folder for files and batches, and a template that reads a variable `tone`
    beside the model's own."""
    template, folder = engine.tokenizer.chat_template + "{{ tone }}", tmp_path_factory.mktemp("served")
    with running(engine, chat_template=template, batch_dir=folder) as found:
        yield found


@pytest.fixture
def tiny_settings() -> dict[str, Any]:
    """Arguments of an `LLM` of the same model."""
    return {"model": TINY, **ENGINE}


@pytest.fixture
def serving(engine: Any) -> Any:
    """`serving(**settings)` is a server of its own settings, around the same engine."""
    return partial(running, engine)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that has the engine: no request runs, and no page is held."""
    yield
    if "engine" not in request.fixturenames:
        return
    llm = request.getfixturevalue("engine")
    try:
        wait_until(partial(is_idle, llm))
    except AssertionError:
        pytest.fail(f"requests or pages are left: {llm.stats()}")
