"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import jaxinfer
from jaxinfer.serve import about, chat, completions, error_handlers, metrics, page, status
from jaxinfer.serve.access_log import AccessLogMiddleware
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
    app.state.metrics = metrics.ServerMetrics(server.model_name, server.llm)
    for body in BODIES.values():
        notes(body)  # a field without a note is an error now, not at its first request
    error_handlers.install(app)

    async def on_gone(request: object, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, on_gone)
    routers = [module.router for module in (completions, chat, about, metrics, status, page)]
    for router in routers:
        app.include_router(router)
    config = server.config
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
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
