"""What the server is and how it does: models, tokens of texts, health."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import jaxinfer
from jaxinfer.request import plain_ids
from jaxinfer.serve import prompts
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.schemas import DetokenizeRequest, TokenizeRequest
from jaxinfer.serve.server import Server
from jaxinfer.serve.sse import answer
from jaxinfer.serve.tools.definitions import read_tool_use

router = APIRouter()


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created_s,
        "owned_by": "jaxinfer",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.max_model_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model, by each of its names."""
    server: Server = request.app.state.server
    return answer({"object": "list", "data": [_model(server, name) for name in server.model_names]})


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> Response:
    """One of the names."""
    server: Server = request.app.state.server
    server.check_model(name)
    return answer(_model(server, name))


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The tokens of a prompt, or of messages as the chat template writes them."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages: give one of them", param="prompt")
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} belongs to messages, not to a prompt", param=name)
        special = body.add_special_tokens is not False
        ids = await prompts.encode(server, body.prompt, "prompt", special)
    else:
        if body.add_special_tokens is not None:
            raise ApiError(400, "add_special_tokens belongs to a prompt, not to messages", param="add_special_tokens")
        ids = await server.llm.encode(partial(prompts.render, server, body, read_tool_use(body.tools)))
    strings = [server.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return answer(
        {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids, "token_strs": strings},
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of tokens."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    ids = plain_ids("tokens", body.tokens, len(server.tokenizer))
    return answer({"prompt": server.tokenizer.decode(ids)})


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the engine lives, and what has befallen it: 503 where it cannot go on."""
    server: Server = request.app.state.server
    failure, stats = server.llm.failure, server.llm.stats()
    told = {
        "status": "ok" if failure is None else "dead",
        "failure": failure,
        "num_failed_steps": stats["num_failed_steps"],
    }
    return answer(told, 200 if failure is None else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are taken: 503 while the server drains, or where the engine is dead."""
    server: Server = request.app.state.server
    return answer({"status": server.state}, 200 if server.state == "ready" else 503)


@router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return answer({"version": jaxinfer.__version__})
