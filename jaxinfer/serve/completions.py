"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.request import CompletionOutput, RequestOutput
from jaxinfer.serve import forms, logprobs, params, prompts
from jaxinfer.serve.schemas import CompletionRequest
from jaxinfer.serve.server import Call, Generation, Prompt, Server, finals
from jaxinfer.serve.sse import DONE, EventStream, answer, event
from jaxinfer.serve.usage import Usage

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Complete one prompt or several."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    sampling = params.of_completion(server, body)
    asked = [Prompt(ids, sampling, text) for text, ids in await prompts.of_completion(server, body)]
    call = Call.of(request, body, "cmpl")
    with forms.named(body):
        generation = await server.open(call, asked, "delta" if body.stream else "final")
    writer = _Writer(server, call, body, asked)
    if body.stream:
        return EventStream(writer.events(generation), generation.close, server.config.stream_timeout_s)
    outputs = await finals(request, generation)
    return answer(writer.whole(outputs))


class _Writer:
    """Answers of one request."""

    def __init__(self, server: Server, call: Call, body: CompletionRequest, asked: Sequence[Prompt]):
        self._server = server
        self._call = call
        self._body = body
        self._asked = asked
        self._usage = Usage(len(asked))
        self._num_characters: dict[int, int] = {}  # of each choice's text, what has been told

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
            choices += [self._choice(index, output, each, first=True) for each in output.outputs]
        return {**self._head(), "choices": choices, "usage": self._usage.of_all()}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        started: set[int] = set()
        async for index, output in generation.outputs():
            self._usage.add(index, output)
            first = index not in started
            started.add(index)
            choices = [
                self._choice(index, output, each, first)
                for each in output.outputs
                if first or each.token_ids or each.text or each.finish_reason
            ]
            for choice in choices:
                yield event({**self._head(), "choices": [choice], **self._usage.of_chunk(options)})
        if options and options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self._usage.of_all()})
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "object": "text_completion",
            "created": self._call.created_s,
            "model": self._server.model_name,
        }

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput, first: bool) -> dict[str, Any]:
        """A choice, or what is new of it; `first` where nothing of its prompt's has been told."""
        body, number = self._body, index * (self._asked[index].params.n) + choice.index
        text = choice.text
        told: dict[str, Any] = {"index": number, "finish_reason": choice.finish_reason, "logprobs": None}
        if body.logprobs is not None:
            told["logprobs"] = self._logprobs(number, output, choice, first)
        if body.echo and first:
            text = self._prompt_text(index, output) + text
        if choice.finish_reason is not None:
            told["stop_reason"] = choice.stop_reason
        if body.prompt_logprobs is not None and first and output.prompt_logprobs is not None:
            told["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs)
        if body.return_token_ids:
            told["token_ids"] = choice.token_ids
            if first:
                told["prompt_token_ids"] = output.prompt_token_ids
        return {**told, "text": text}

    def _prompt_text(self, index: int, output: RequestOutput) -> str:
        text = self._asked[index].text
        if text is not None and self._body.truncate_prompt_tokens is None:
            return text
        return self._server.tokenizer.decode(output.prompt_token_ids)

    def _logprobs(self, number: int, output: RequestOutput, choice: CompletionOutput, first: bool) -> dict[str, Any]:
        ids, entries = choice.token_ids, list(choice.logprobs or [])
        if self._body.echo and first:
            ids, entries = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or []), *entries]
        offset = self._num_characters.get(number, 0)
        found = logprobs.of_completion(
            ids,
            entries,
            self._body.logprobs or 0,
            offset=offset,
            as_ids=bool(self._body.return_tokens_as_token_ids),
            tokenizer=self._server.tokenizer,
        )
        self._num_characters[number] = offset + sum(len(self._server.tokenizer.token_text(token)) for token in ids)
        return found
