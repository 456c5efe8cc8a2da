"""The bodies of the endpoints that read texts and draw nothing. Each field says where it is enforced."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxinfer.serve.fields import Body, Enforced
from jaxinfer.serve.schemas import Number

Pooling = Literal["mean", "last"]


class ReadingBody(Body):
    """What both take."""

    model: Annotated[str | None, Enforced("Server.check_model: 404 for another model's name")] = None
    pooling: Annotated[Pooling | None, Enforced("pooling.pooled, in place of --pooling")] = None
    add_special_tokens: Annotated[bool | None, Enforced("Tokenizer.encode")] = None
    truncate_prompt_tokens: Annotated[int | None, Enforced("prompts.checked: only a text's last tokens are used")] = (
        None
    )
    user: Annotated[str | None, Enforced("RequestOptions.tenant, unless keys say who")] = None
    priority: Annotated[int | None, Enforced("RequestOptions.priority: the scheduler's order")] = None
    cache_salt: Annotated[str | None, Enforced("RequestOptions.cache_salt: the prefix cache")] = None
    timeout_s: Annotated[Number | None, Enforced("RequestOptions.timeout_s: up to the server's limit")] = None


class EmbeddingRequest(ReadingBody):
    """`POST /v1/embeddings`."""

    input: Annotated[
        str | list[str] | list[int] | list[list[int]], Enforced("texts or token ids, each read by the model")
    ]
    encoding_format: Annotated[Literal["float", "base64"] | None, Enforced("pooling.encoded")] = None
    dimensions: Annotated[int | None, Enforced("pooling.shortened")] = None


Content = str | list[int]


class ScoreRequest(ReadingBody):
    """`POST /v1/score`: `prompt` with `continuations`, or `text_1` with `text_2`."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]] | None, Enforced("score: what the continuations follow")
    ] = None
    continuations: Annotated[
        str | list[int] | list[Content] | list[Content | list[Content]] | None,
        Enforced("score: whose likelihood is told"),
    ] = None
    text_1: Annotated[str | list[str] | None, Enforced("score: one side of the similarity")] = None
    text_2: Annotated[str | list[str] | None, Enforced("score: the other side")] = None
