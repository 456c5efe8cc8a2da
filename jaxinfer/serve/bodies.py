"""Which body each endpoint takes."""

from __future__ import annotations

from jaxinfer.serve.anthropic.schemas import CountTokensRequest, MessagesRequest
from jaxinfer.serve.batch_schemas import BatchRequest, FileUpload
from jaxinfer.serve.embedding_schemas import EmbeddingRequest, ScoreRequest
from jaxinfer.serve.fields import Body
from jaxinfer.serve.responses.schemas import ResponsesRequest
from jaxinfer.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/files": FileUpload,
    "/v1/batches": BatchRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
