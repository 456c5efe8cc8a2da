"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams
from jaxinfer.serve import forms, logprobs, params, prompts
from jaxinfer.serve.reply import ReplyReader, delta_as_openai
from jaxinfer.serve.schemas import ChatRequest
from jaxinfer.serve.server import Call, Generation, Prompt, Server, finals
from jaxinfer.serve.sse import DONE, EventStream, answer, event
from jaxinfer.serve.tools.definitions import ToolUse, read_tool_use
from jaxinfer.serve.usage import Usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    sampling = params.of_chat(server, body)
    ids = await prompts.of_chat(server, body, use)
    call = Call.of(request, body, "chatcmpl")
    generation = await open_chat(server, call, body, sampling, use, ids)
    writer = _Writer(server, call, body, partial(server.dialect.reader, use, ids))
    if body.stream:
        return EventStream(writer.events(generation), generation.close, server.config.stream_timeout_s)
    (output,) = await finals(request, generation)
    return answer(writer.whole(output))


async def open_chat(
    server: Server, call: Call, body: ChatRequest, sampling: SamplingParams, use: ToolUse, ids: list[int]
) -> Generation:
    """Bring a conversation to the engine, under the grammar that its form, its tools and reasoning make; see
    `Server.open`. What is wrong with the grammar is told of the field that asks for it.
    """
    constrained = params.with_calls(server, body, sampling, use, ids)
    is_made = constrained.structured_outputs is not sampling.structured_outputs
    with forms.named(body), params.naming_tools(use, is_made):
        return await server.open(call, [Prompt(ids, constrained)], "delta" if body.stream else "final")


class _Writer:
    """Answers of one request. `make_reader` makes what reads one choice."""

    def __init__(self, server: Server, call: Call, body: ChatRequest, make_reader: Callable[[], ReplyReader]):
        self._server = server
        self._call = call
        self._body = body
        self._usage = Usage(1)
        self._make_reader = make_reader
        self._readers: dict[int, ReplyReader] = {}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.add(0, output)
        choices = []
        for each in output.outputs:
            reader = self._readers[each.index] = self._make_reader()
            reply = reader.read(each.text)
            choices.append({**self._choice(each), "message": {**reply.as_openai(), "refusal": None}})
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage.of_all(),
            **self._of_prompt(output),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        async for _, output in generation.outputs():
            self._usage.add(0, output)
            told = self._usage.of_chunk(options)
            head = {**self._head("chat.completion.chunk"), **told}
            for each in output.outputs:
                if each.index not in self._readers:
                    opening = {"index": each.index, "delta": {"role": "assistant", "content": ""}}
                    own = {} if self._readers else self._of_prompt(output)
                    self._readers[each.index] = self._make_reader()
                    yield event({**head, "choices": [{**opening, "finish_reason": None, "logprobs": None}], **own})
                delta = self._delta(each)
                if delta or each.token_ids or each.finish_reason:
                    yield event({**head, "choices": [{**self._choice(each), "delta": delta}]})
        if options and options.include_usage:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.of_all()})
        yield DONE

    def _delta(self, choice: CompletionOutput) -> dict[str, Any]:
        """What new text adds to the message; what may yet become a call or a tag waits."""
        reader = self._readers[choice.index]
        delta = reader.add(choice.text)
        if choice.finish_reason is not None:
            delta = delta + reader.finish()
        return delta_as_openai(delta)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "object": kind,
            "created": self._call.created_s,
            "model": self._server.model_name,
        }

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            told["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return told

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        """What is told of a choice beside its text."""
        reason = choice.finish_reason
        if reason == "stop" and self._readers[choice.index].num_calls:
            reason = "tool_calls"
        told: dict[str, Any] = {"index": choice.index, "finish_reason": reason, "logprobs": None}
        if self._body.logprobs:
            told["logprobs"] = logprobs.of_chat(
                choice.token_ids,
                choice.logprobs or [],
                self._body.top_logprobs or 0,
                as_ids=bool(self._body.return_tokens_as_token_ids),
                tokenizer=self._server.tokenizer,
            )
        if choice.finish_reason is not None:
            told["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            told["token_ids"] = choice.token_ids
        return told
