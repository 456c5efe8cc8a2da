"""What the endpoints of other formats than chat completions take beside their own fields, by the same names."""

from __future__ import annotations

from typing import Annotated, Any

from jaxinfer.serve.fields import Body, Enforced
from jaxinfer.serve.schemas import Number, Sampled


class Extensions(Body):
    """Fields that the format's own API does not have, or has not any more; as in `POST /v1/chat/completions`."""

    top_k: Annotated[int | None, Sampled] = None
    min_p: Annotated[Number | None, Sampled] = None
    seed: Annotated[int | None, Sampled] = None
    presence_penalty: Annotated[Number | None, Sampled] = None
    frequency_penalty: Annotated[Number | None, Sampled] = None
    repetition_penalty: Annotated[Number | None, Sampled] = None
    logit_bias: Annotated[dict[str, Number] | None, Sampled] = None
    min_tokens: Annotated[int | None, Enforced("SamplingParams: token mask")] = None
    ignore_eos: Annotated[bool | None, Enforced("SamplingParams: detokenizer")] = None
    priority: Annotated[int | None, Enforced("RequestOptions.priority: the scheduler's order")] = None
    cache_salt: Annotated[str | None, Enforced("RequestOptions.cache_salt: the prefix cache")] = None
    timeout_s: Annotated[Number | None, Enforced("RequestOptions.timeout_s: up to the server's limit")] = None

    @property
    def extensions(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: value for name in Extensions.model_fields if (value := getattr(self, name)) is not None}
