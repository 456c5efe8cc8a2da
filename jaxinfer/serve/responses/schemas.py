"""The body of `POST /v1/responses`; each field says where it is enforced."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxinfer.serve.fields import Accepted, Body, Enforced, Refused
from jaxinfer.serve.schemas import Extensions, Name, Number, Sampled, Text, Texts

LOGPROBS = "message.output_text.logprobs"
MetadataText = Annotated[str, Field(max_length=512)]


class StreamOptions(Body):
    """What a stream tells beside its events."""

    include_obfuscation: Annotated[Literal[False] | None, Field(description="padding is not made")] = None


class TextFormat(Body):
    """Text of any form, any JSON object, or JSON of a schema, which the other fields belong to."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    description: str | None = None
    strict: Annotated[bool | None, Field(description="every schema is held to, so this changes nothing")] = None


class TextConfig(Body):
    """The form of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"] | None, Field(description="models here have one verbosity")] = None


class ResponsesRequest(Extensions):
    """`POST /v1/responses`."""

    model: Annotated[str | None, Enforced("Server.check_model: 404 for another model's name")] = None
    input: Annotated[
        str | list[dict[str, Any]], Enforced("responses.conversation: a user's text, or items; the chat template")
    ]
    instructions: Annotated[str | None, Enforced("responses.conversation: a system message before all others")] = None
    previous_response_id: Annotated[str | None, Enforced("ResponseStore.get: the conversation that goes on")] = None
    store: Annotated[bool | None, Enforced("ResponseStore.put: kept unless false, within the server's bounds")] = None
    stream: Annotated[bool | None, Enforced("the answer is a stream of typed server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, Accepted("streams have no padding to leave out")] = None
    max_output_tokens: Annotated[
        int | None, Field(ge=1), Enforced("SamplingParams.max_tokens: the scheduler ends the sequence")
    ] = None
    stop: Annotated[Text | Texts | None, Enforced("SamplingParams: detokenizer")] = None
    temperature: Annotated[Number | None, Sampled] = None
    top_p: Annotated[Number | None, Sampled] = None
    include: Annotated[list[Literal["message.output_text.logprobs"]] | None, Enforced("SamplingParams.logprobs")] = None
    top_logprobs: Annotated[int | None, Enforced("SamplingParams.logprobs, with include")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Enforced("responses.conversation: auto leaves the oldest turns out")
    ] = None
    text: Annotated[TextConfig | None, Enforced("forms.of: the token mask of SamplingParams.structured_outputs")] = None
    metadata: Annotated[dict[str, MetadataText] | None, Field(max_length=16), Enforced("told in the answer")] = None
    user: Annotated[Name | None, Enforced("RequestOptions.tenant: fair shares and limits, unless keys say who")] = None
    safety_identifier: Annotated[Name | None, Enforced("in place of user, where that is absent")] = None
    prompt_cache_key: Annotated[str | None, Accepted("prefixes are found by their tokens")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory"] | None, Accepted("prefixes stay while there is room")
    ] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Accepted("there is one tier")] = None
    background: Annotated[Literal[False] | None, Accepted("answers are given to the request that asks")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Enforced("responses.tools: functions; the chat template, or a system message")
    ] = None
    tool_choice: Annotated[Any, Enforced("responses.tools: which calls are read; Dialect.grammar: forced ones")] = None
    parallel_tool_calls: Annotated[bool | None, Enforced("Dialect.grammar: one call at most where false")] = None
    max_tool_calls: Annotated[None, Refused("this server runs no tools of its own")] = None
    reasoning: Annotated[None, Refused("how much a model reasons cannot be set; leave it out")] = None
    conversation: Annotated[None, Refused("there are no conversations here; use previous_response_id")] = None
    prompt: Annotated[None, Refused("there are no stored prompts here; send instructions and input")] = None
    prompt_cache_options: Annotated[None, Refused("prefixes are cached by themselves; leave it out")] = None
    context_management: Annotated[None, Refused("contexts are not compacted; use truncation")] = None
    moderation: Annotated[None, Refused("there is no moderation here")] = None
    access_programs: Annotated[None, Refused("there are none here")] = None
    background_options: Annotated[None, Refused("answers are given to the request that asks")] = None
    image: Annotated[None, Refused("this server takes no images")] = None
