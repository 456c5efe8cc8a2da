"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import jaxinfer
from jaxinfer.serve import about, chat, completions, embeddings, errors, score
from jaxinfer.serve.bodies import BODIES
from jaxinfer.serve.fields import notes
from jaxinfer.serve.middleware import Authentication, BodyLimit
from jaxinfer.serve.server import Server
from jaxinfer.serve.sse import ClientGone

CLIENT_CLOSED_REQUEST = 499
"""What logs show of a request whose client left; nobody reads the answer."""


def create_app(server: Server) -> FastAPI:
    """The endpoints of one model, as an ASGI application."""
    # The pages of docs load their scripts from another host; the document itself stays.
    app = FastAPI(title="jaxinfer", version=jaxinfer.__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    for body in BODIES.values():
        notes(body)  # a field without a note is an error now, not at its first request
    errors.install(app)

    async def on_gone(request: object, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, on_gone)
    for module in (completions, chat, embeddings, score, about):
        app.include_router(module.router)
    config = server.config
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
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
