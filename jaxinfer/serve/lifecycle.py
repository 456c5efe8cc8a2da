"""A server's life: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from importlib.util import find_spec
from types import FrameType

import uvicorn

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.flags import served_name
from jaxinfer.serve.access_log import log_to_stderr
from jaxinfer.serve.app import create_app
from jaxinfer.serve.batch_service import BatchService
from jaxinfer.serve.cli import Settings
from jaxinfer.serve.config import ServerConfig
from jaxinfer.serve.error_handlers import Answered
from jaxinfer.serve.server import Server
from jaxinfer.serve.tracing import Tracer

logger = logging.getLogger("jaxinfer.serve")

_GRACE_S = 5  # for answers whose requests were ended to leave


class PortError(OSError):
    """The address cannot be had."""


def bind(config: ServerConfig) -> socket.socket:
    """The address, taken before the model is loaded; connections are refused until the server listens.

    Raises:
        PortError: somebody has it, or it is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise PortError(f"{config.host}:{config.port}: {reason}; choose another with --host and --port") from None
    bound.set_inheritable(False)
    return bound


def url_of(config: ServerConfig, bound: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{bound.getsockname()[1]}"


def run(settings: Settings) -> int:
    """Serve until a signal; the exit code.

    Raises:
        PortError, ValueError, CheckpointError: it could not start.
    """
    endpoint = settings.server.otlp_traces_endpoint
    tracer = None if endpoint is None else Tracer.to(endpoint)
    log_to_stderr()
    bound = bind(settings.server)
    with bound, nullcontext() if tracer is None else closing(tracer):
        llm = AsyncLLM(settings.model, **settings.engine)
        try:
            names = settings.model_names or (served_name(settings.model, llm.source),)
            server = Server(llm, settings.server, names)
            server.tracer = tracer
            return serve(server, bound)
        finally:
            llm.close()


def serve(server: Server, bound: socket.socket) -> int:
    """Serve on a bound socket until a signal; the exit code."""
    draining = make_uvicorn(server, bound)
    draining.run(sockets=[bound])
    return draining.exit_code


def make_uvicorn(server: Server, bound: socket.socket) -> DrainingServer:
    """The HTTP server for a bound socket; its `serve` or `run` serves."""
    config = server.config
    app = create_app(server)
    uvicorn_config = uvicorn.Config(
        Answered(app),
        loop="uvloop" if find_spec("uvloop") else "asyncio",
        http="httptools" if find_spec("httptools") else "h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )
    return DrainingServer(uvicorn_config, server, url_of(config, bound), app.state.batches)


class DrainingServer(uvicorn.Server):
    """Uvicorn whose first signal ends admission, and whose end comes when what runs has finished."""

    def __init__(self, config: uvicorn.Config, server: Server, url: str, batches: BatchService | None = None):
        super().__init__(config)
        self.exit_code = 0
        self._server = server
        self._url = url
        self._batches = batches
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            if self._batches is not None:
                self._batches.start()
            print(f"jaxinfer: ready at {self._url}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._batches is not None:
            await self._batches.stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours in place of uvicorn's, which ends at once and raises the signal again."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        try:
            before = {kind: signal.signal(kind, self._on_signal) for kind in kinds}
        except ValueError:  # not the main thread, as in tests: whoever runs it ends it
            yield
            return
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.end, signal.Signals(number).name)

    def end(self, reason: str) -> None:
        """In the event loop: drain, or stop at once where it drains already."""
        if self._drain is None:
            num = self._server.admission.num_requests
            print(f"jaxinfer: {reason}: draining, {num} requests run", file=sys.stderr, flush=True)
            self._server.admission.draining = True
            self._drain = asyncio.ensure_future(self._finish())
        else:
            print(f"jaxinfer: {reason} again: stopping now", file=sys.stderr, flush=True)
            self.exit_code = 1
            self.should_exit = self.force_exit = True

    async def _finish(self) -> None:
        admission, timeout_s = self._server.admission, self._server.config.drain_timeout_s
        try:
            await asyncio.wait_for(admission.idle(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests did not finish in %g s and are ended", admission.num_requests, timeout_s)
            await self._server.abort_all()
        self.should_exit = True
