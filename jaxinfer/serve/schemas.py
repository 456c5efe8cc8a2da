"""The bodies of the completion endpoints. Each field says where it is enforced; the test of the table walks them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxinfer.serve.fields import Accepted, Body, Enforced, Refused, few_keys, first_wrong
from jaxinfer.serve.forms import ResponseFormat, StructuredOutputs

Number = float  # whole ones too
# Each of these costs time at every token, on the engine's thread, which all requests share.
Text = Annotated[str, Field(max_length=1024)]
Texts = Annotated[list[Text], Field(max_length=256)]
Ids = Annotated[list[int], Field(max_length=1 << 18)]  # more than vocabularies have
Name = Annotated[str, Field(max_length=512)]  # stands in the log, and in the scheduler's table of tenants
Formed = Enforced("forms.of: the token mask of SamplingParams.structured_outputs")
Sampled = Enforced("SamplingParams, on the device")


class StreamOptions(Body):
    """What a stream tells beside text."""

    include_usage: Annotated[bool | None, Field(description="end with a chunk that holds the usage")] = None
    continuous_usage_stats: Annotated[bool | None, Field(description="give the usage with every chunk")] = None
    include_obfuscation: Annotated[Literal[False] | None, Field(description="padding is not made")] = None


class Extensions(Body):
    """What every endpoint that generates takes, by the same names, where its own API has no such field."""

    top_k: Annotated[int | None, Sampled] = None
    min_p: Annotated[Number | None, Sampled] = None
    seed: Annotated[int | None, Sampled] = None
    presence_penalty: Annotated[Number | None, Sampled] = None
    frequency_penalty: Annotated[Number | None, Sampled] = None
    repetition_penalty: Annotated[Number | None, Sampled] = None
    logit_bias: Annotated[dict[str, Number] | None, BeforeValidator(first_wrong), Sampled] = None
    min_tokens: Annotated[int | None, Enforced("SamplingParams: token mask")] = None
    ignore_eos: Annotated[bool | None, Enforced("SamplingParams: detokenizer")] = None
    priority: Annotated[int | None, Enforced("RequestOptions.priority: the scheduler's order")] = None
    cache_salt: Annotated[str | None, Enforced("RequestOptions.cache_salt: the prefix cache")] = None
    timeout_s: Annotated[Number | None, Enforced("RequestOptions.timeout_s: up to the server's limit")] = None

    @property
    def extensions(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: value for name in Extensions.model_fields if (value := getattr(self, name)) is not None}


class GenerationBody(Extensions):
    """What completions and chat completions take."""

    model: Annotated[str | None, Enforced("Server.check_model: 404 for another model's name")] = None
    stream: Annotated[bool | None, Enforced("the answer is a stream of server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, Enforced("streaming: usage chunks")] = None
    n: Annotated[int | None, Sampled] = None
    temperature: Annotated[Number | None, Sampled] = None
    top_p: Annotated[Number | None, Sampled] = None
    typical_p: Annotated[Number | None, Sampled] = None
    allowed_token_ids: Annotated[Ids | None, Enforced("SamplingParams: token mask")] = None
    bad_words: Annotated[Texts | None, Enforced("SamplingParams: token mask")] = None
    logits_processors: Annotated[
        list[str] | dict[str, dict[str, Number]] | None,
        BeforeValidator(few_keys),
        Enforced("SamplingParams: registered processors, by name"),
    ] = None
    max_tokens: Annotated[int | None, Enforced("SamplingParams: the scheduler ends the sequence")] = None
    stop: Annotated[Text | Texts | None, Enforced("SamplingParams: detokenizer")] = None
    stop_token_ids: Annotated[Ids | None, Enforced("SamplingParams: detokenizer")] = None
    include_stop_str_in_output: Annotated[bool | None, Enforced("SamplingParams: detokenizer")] = None
    skip_special_tokens: Annotated[bool | None, Enforced("SamplingParams: detokenizer")] = None
    spaces_between_special_tokens: Annotated[
        Literal[True] | None, Accepted("special tokens are joined as the tokenizer joins them")
    ] = None
    prompt_logprobs: Annotated[int | None, Enforced("SamplingParams: the head over the prompt")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Enforced("prompts.truncated: only the prompt's last tokens are used")
    ] = None
    return_token_ids: Annotated[bool | None, Enforced("choices and prompt with their token ids")] = None
    return_tokens_as_token_ids: Annotated[bool | None, Enforced('log-probabilities name tokens "token_id:7"')] = None
    response_format: Annotated[ResponseFormat | None, Formed] = None
    structured_outputs: Annotated[StructuredOutputs | None, Formed] = None
    guided_json: Annotated[dict[str, Any] | bool | str | None, Formed] = None
    guided_regex: Annotated[str | None, Formed] = None
    guided_choice: Annotated[list[str] | None, Formed] = None
    guided_grammar: Annotated[str | None, Formed] = None
    user: Annotated[Name | None, Enforced("RequestOptions.tenant: fair shares and limits, unless keys say who")] = None
    safety_identifier: Annotated[Name | None, Enforced("in place of user, where that is absent")] = None
    store: Annotated[Literal[False] | None, Accepted("nothing is stored")] = None
    metadata: Annotated[dict[str, Any] | None, Accepted("the client's own; nothing is stored")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Accepted("there is one tier")] = None
    prompt_cache_key: Annotated[str | None, Accepted("prefixes are found by their tokens")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory"] | None, Accepted("prefixes stay while there is room")
    ] = None
    use_beam_search: Annotated[Literal[False] | None, Accepted("no beam search over HTTP")] = None
    length_penalty: Annotated[Literal[1] | None, Accepted("of beam search, which is off")] = None
    early_stopping: Annotated[Literal[False] | None, Accepted("of beam search, which is off")] = None


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]], Enforced("prompts.of_completion: text or token ids, or a list")
    ]
    best_of: Annotated[int | None, Enforced("SamplingParams.best_of")] = None
    echo: Annotated[bool | None, Enforced("completions: the prompt goes before the text")] = None
    logprobs: Annotated[int | None, Enforced("SamplingParams.logprobs")] = None
    add_special_tokens: Annotated[bool | None, Enforced("Tokenizer.encode")] = None
    suffix: Annotated[None, Refused("the model cannot fill in before a suffix; leave it out")] = None


class ChatRequest(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Enforced("the chat template")]
    max_completion_tokens: Annotated[int | None, Enforced("SamplingParams.max_tokens, before max_tokens")] = None
    logprobs: Annotated[bool | None, Enforced("SamplingParams.logprobs")] = None
    top_logprobs: Annotated[int | None, Enforced("SamplingParams.logprobs")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Enforced("the chat template, or a system message; Dialect.reader: calls")
    ] = None
    tool_choice: Annotated[Any, Enforced("read_tool_use: which calls are read; Dialect.grammar: forced ones")] = None
    parallel_tool_calls: Annotated[bool | None, Enforced("Dialect.grammar: one call at most where false")] = None
    functions: Annotated[None, Refused("is the old form; use tools")] = None
    function_call: Annotated[None, Refused("is the old form; use tool_choice")] = None
    add_generation_prompt: Annotated[bool | None, Enforced("the chat template")] = None
    continue_final_message: Annotated[bool | None, Enforced("the chat template")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Enforced("the chat template's variables")] = None
    verbosity: Annotated[Literal["medium"] | None, Accepted("models here have one verbosity")] = None
    modalities: Annotated[list[Literal["text"]] | None, Accepted("answers are text")] = None
    audio: Annotated[None, Refused("this server makes no audio")] = None
    prediction: Annotated[None, Refused("predicted outputs are not available; leave it out")] = None
    web_search_options: Annotated[None, Refused("there is no web search")] = None


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: Annotated[str | None, Enforced("Server.check_model")] = None
    prompt: Annotated[str | None, Enforced("Tokenizer.encode")] = None
    messages: Annotated[list[dict[str, Any]] | None, Enforced("the chat template")] = None
    tools: Annotated[list[dict[str, Any]] | None, Enforced("the chat template, or a system message")] = None
    add_special_tokens: Annotated[bool | None, Enforced("Tokenizer.encode, of a prompt")] = None
    add_generation_prompt: Annotated[bool | None, Enforced("the chat template")] = None
    continue_final_message: Annotated[bool | None, Enforced("the chat template")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Enforced("the chat template's variables")] = None
    return_token_strs: Annotated[bool | None, Enforced("token_strs in the answer")] = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: Annotated[str | None, Enforced("Server.check_model")] = None
    tokens: Annotated[Ids, Enforced("Tokenizer.decode")]
