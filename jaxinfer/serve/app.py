"""The ASGI application."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import jaxinfer
from jaxinfer.serve import (
    about,
    batches,
    chat,
    completions,
    embeddings,
    error_handlers,
    files,
    metrics,
    page,
    score,
    status,
)
from jaxinfer.serve.access_log import AccessLogMiddleware
from jaxinfer.serve.anthropic import endpoints as anthropic
from jaxinfer.serve.batch_service import BatchService
from jaxinfer.serve.bodies import BODIES
from jaxinfer.serve.fields import notes
from jaxinfer.serve.middleware import Authentication, BodyLimit, OtherPages, is_loopback
from jaxinfer.serve.responses import endpoints as responses
from jaxinfer.serve.server import Server
from jaxinfer.serve.sse import ClientGone
from jaxinfer.serve.uploads import MAX_FORM_BYTES

logger = logging.getLogger("jaxinfer.serve")

CLIENT_CLOSED_REQUEST = 499
"""What logs show of a request whose client left; nobody reads the answer."""


GENERATING = (completions, chat, embeddings, score)
"""The endpoints that the engine works for; a batch asks them."""


def create_app(server: Server) -> FastAPI:
    """The endpoints of one model, as an ASGI application.

    Raises:
        OSError: the folder for files and batches cannot be used.
    """
    for body in BODIES.values():
        notes(body)  # a field without a note is an error now, not at its first request
    routers = [
        module.router for module in (*GENERATING, responses, anthropic, about, files, batches, metrics, status, page)
    ]
    app = _app(server, routers)
    app.state.metrics = metrics.ServerMetrics(server.model_name, server.llm)
    app.state.batches = _batches(server)
    config = server.config
    # The last one added is the first that a request meets.
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, streamed={"/v1/files": config.max_file_bytes + MAX_FORM_BYTES}
    )
    # With keys, a page that somebody led here has none.
    only_local = is_loopback(config.host) and not config.api_keys
    app.add_middleware(OtherPages, allowed_origins=config.allowed_origins, only_local=only_local)
    if config.api_keys:
        app.add_middleware(Authentication, keys=config.api_keys, open_paths=page.PATHS)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(
        AccessLogMiddleware,
        log_format=config.log_format,
        log_prompts=config.log_prompts,
        metrics=app.state.metrics,
        tracer=server.tracer,
        paths=frozenset(getattr(route, "path", "") for router in routers for route in router.routes),
    )
    return app


def _app(server: Server, routers: Sequence[APIRouter]) -> FastAPI:
    # The pages of docs load their scripts from another host; the document itself stays.
    app = FastAPI(title="jaxinfer", version=jaxinfer.__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    error_handlers.install(app)

    async def on_gone(request: object, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, on_gone)
    for router in routers:
        app.include_router(router)
    return app


def _batches(server: Server) -> BatchService | None:
    config = server.config
    if config.batch_dir is None:
        return None
    try:
        return BatchService(server, _app(server, [module.router for module in GENERATING]), config.batch_dir)
    except OSError as error:
        if config.needs_batch_dir:
            raise
        logger.warning("files and batches are off (%s); --batch-dir FOLDER gives them a place", error)
        return None
