"""`/v1/embeddings`: the pooled states of the last layer, after its norm, at length 1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.serve import pooling, prompts
from jaxinfer.serve.embedding_schemas import EmbeddingRequest
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.server import Call, Server
from jaxinfer.serve.sse import answer, unless_gone

router = APIRouter()

MAX_INPUTS = 2048


@router.post("/v1/embeddings")
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """A vector for each input."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    size = server.llm.embed_dim
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        raise ApiError(
            400, f"dimensions={body.dimensions} must be from 1 up to this model's {size}", param="dimensions"
        )
    texts = await _texts(server, body)
    call = Call.make(request, "embd", body.user, body.priority, body.cache_salt, body.timeout_s)
    found = await unless_gone(request, pooling.vectors(server, call, texts, body.pooling or server.config.pooling))
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": pooling.encoded(pooling.shortened(vector, body.dimensions), body.encoding_format or "float"),
        }
        for index, vector in enumerate(found)
    ]
    num_tokens = sum(map(len, texts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return answer({"object": "list", "model": server.model_name, "data": data, "usage": usage})


async def _texts(server: Server, body: EmbeddingRequest) -> list[list[int]]:
    """The ids of each input. Raises `ApiError` naming the one that is empty or too long."""
    given: Any = body.input
    if isinstance(given, list) and not isinstance(next(iter(given), 0), int) and len(given) > MAX_INPUTS:
        raise ApiError(400, f"input has {len(given)} entries and {MAX_INPUTS} are the most; split it", param="input")
    found = await prompts.each(server, given, "input", body.add_special_tokens, body.truncate_prompt_tokens)
    return [ids for _, ids in found]
