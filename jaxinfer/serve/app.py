"""The ASGI application."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import jaxinfer
from jaxinfer.serve import about, batches, chat, completions, embeddings, errors, files, score
from jaxinfer.serve.batch_service import BatchService
from jaxinfer.serve.bodies import BODIES
from jaxinfer.serve.fields import notes
from jaxinfer.serve.middleware import Authentication, BodyLimit
from jaxinfer.serve.server import Server
from jaxinfer.serve.sse import ClientGone
from jaxinfer.serve.uploads import MAX_FORM_BYTES

logger = logging.getLogger("jaxinfer.serve")

CLIENT_CLOSED_REQUEST = 499
"""What logs show of a request whose client left; nobody reads the answer."""


def create_app(server: Server) -> FastAPI:
    """The endpoints of one model, as an ASGI application.

    Raises:
        OSError: the folder for files and batches cannot be used.
    """
    for body in BODIES.values():
        notes(body)  # a field without a note is an error now, not at its first request
    app = _endpoints(server)
    for module in (files, batches):
        app.include_router(module.router)
    app.state.batches = _batches(server)
    config = server.config
    # The last one added is the first that a request meets.
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, streamed={"/v1/files": config.max_file_bytes + MAX_FORM_BYTES}
    )
    if config.api_keys:
        app.add_middleware(Authentication, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _endpoints(server: Server) -> FastAPI:
    """What HTTP requests and the lines of batches are answered by."""
    # The pages of docs load their scripts from another host; the document itself stays.
    app = FastAPI(title="jaxinfer", version=jaxinfer.__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    errors.install(app)

    async def on_gone(request: object, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, on_gone)
    for module in (completions, chat, embeddings, score, about):
        app.include_router(module.router)
    return app


def _batches(server: Server) -> BatchService | None:
    config = server.config
    if config.batch_dir is None:
        return None
    try:
        return BatchService(server, _endpoints(server), config.batch_dir)
    except OSError as error:
        if config.needs_batch_dir:
            raise
        logger.warning("files and batches are off (%s); --batch-dir FOLDER gives them a place", error)
        return None
