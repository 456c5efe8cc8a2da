"""The bodies of `POST /v1/messages` and `…/count_tokens`; each field says where it is enforced."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxinfer.serve.fields import Accepted, Body, Enforced, Refused
from jaxinfer.serve.schemas import Extensions, Name, Number, Sampled, Text

MAX_STOP_SEQUENCES = 64


class CacheControl(Body):
    """A mark that the prefix up to here is worth keeping."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Metadata(Body):
    """Who asks."""

    user_id: Name | None = None


class ThinkingDisabled(Body):
    """The one setting of thinking."""

    type: Literal["disabled"]


class OutputFormat(Body):
    """JSON of a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: Annotated[None, Field(description="how much a model thinks cannot be set")] = None


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    model: Annotated[str | None, Enforced("Server.check_model: 404 for another model's name")] = None
    messages: Annotated[list[dict[str, Any]], Enforced("anthropic.conversation; the chat template")]
    system: Annotated[
        str | list[dict[str, Any]] | None, Enforced("anthropic.conversation: a system message before all others")
    ] = None
    cache_control: Annotated[CacheControl | None, Accepted("every prefix is kept while there is room")] = None
    thinking: Annotated[ThinkingDisabled | None, Accepted("thinking cannot be switched on here")] = None
    speed: Annotated[Literal["standard"] | None, Accepted("there is one speed")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Enforced("anthropic.tools: functions; the chat template, or a system message")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None, Enforced("anthropic.tools: which calls are read; Dialect.grammar: forced ones")
    ] = None
    output_config: Annotated[OutputConfig | None, Accepted("the form of the answer adds nothing to the prompt")] = None
    context_management: Annotated[None, Refused("contexts are not edited here; send the messages that count")] = None
    mcp_servers: Annotated[None, Refused("this server calls no others")] = None
    user_profile_id: Annotated[None, Refused("there are no profiles here; use metadata.user_id")] = None
    workspace_id: Annotated[None, Refused("there are no workspaces here")] = None


class MessagesRequest(CountTokensRequest, Extensions):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1), Enforced("SamplingParams.max_tokens: the scheduler ends the sequence")]
    output_config: Annotated[
        OutputConfig | None, Enforced("forms.of: the token mask of SamplingParams.structured_outputs")
    ] = None
    stop_sequences: Annotated[
        list[Annotated[Text, Field(min_length=1)]] | None,
        Field(max_length=MAX_STOP_SEQUENCES),
        Enforced("SamplingParams.stop: detokenizer"),
    ] = None
    stream: Annotated[bool | None, Enforced("the answer is a stream of typed server-sent events")] = None
    temperature: Annotated[Number | None, Sampled] = None
    top_p: Annotated[Number | None, Sampled] = None
    metadata: Annotated[
        Metadata | None, Enforced("user_id: RequestOptions.tenant: fair shares and limits, unless keys say who")
    ] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Accepted("there is one tier")] = None
    container: Annotated[None, Refused("this server runs no code")] = None
    inference_geo: Annotated[None, Refused("this server is where it is")] = None
    diagnostics: Annotated[None, Refused("there are none to ask for")] = None
