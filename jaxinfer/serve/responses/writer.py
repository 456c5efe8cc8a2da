"""Answers of `/v1/responses`, whole and as streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams
from jaxinfer.serve import logprobs
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.responses.output import Output
from jaxinfer.serve.responses.schemas import ResponsesRequest
from jaxinfer.serve.schemas import ChatRequest
from jaxinfer.serve.segments import SegmentReader
from jaxinfer.serve.server import Call, Generation, Server
from jaxinfer.serve.sse import event
from jaxinfer.serve.usage import Usage

_ENDED = {
    "timeout": "the request took longer than it may; what there was by then is in the output",
    "abort": "the server is shutting down; what there was by then is in the output",
}


class Writer:
    """Answers one request. `keep` stores a finished answer, if it is to be, and says whether."""

    def __init__(
        self,
        server: Server,
        call: Call,
        body: ResponsesRequest,
        chat: ChatRequest,
        sampling: SamplingParams,
        reader: SegmentReader,
        keep: Callable[[dict[str, Any]], bool],
    ):
        self._server = server
        self._call = call
        self._body = body
        self._chat = chat
        self._sampling = sampling
        self._reader = reader
        self._keep = keep
        self._usage = Usage(1)
        self._output = Output()
        self._num_events = 0

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.add(0, output)
        (choice,) = output.outputs
        segments = await asyncio.to_thread(self._reader.add, choice.text)
        for _ in self._output.add(segments, self._logprobs(choice)):
            pass
        return (await self._finish(choice))[0]

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun = self._response("in_progress")
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        async for _, output in generation.outputs():
            self._usage.add(0, output)
            (choice,) = output.outputs
            entries = self._logprobs(choice)
            for told in self._output.add(self._reader.add(choice.text), entries):
                yield self._event(told)
            if choice.finish_reason is not None:
                response, events = await self._finish(choice)
                for told in events:
                    yield self._event(told)
                yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response("failed", error={"code": code, "message": error.message})
        return self._event({"type": "response.failed", "response": response})

    async def _finish(self, choice: CompletionOutput) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The answer, kept where it is to be, and the events that end its items."""
        whole = choice.finish_reason == "stop"
        events = list(self._output.add(self._reader.finish(), []))
        events += self._output.finish("completed" if whole else "incomplete")
        if whole:
            response = self._response("completed")
        elif choice.finish_reason == "length":
            response = self._response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            message = _ENDED.get(str(choice.finish_reason), f"it ended with {choice.finish_reason}")
            response = self._response("failed", error={"code": "server_error", "message": message})
        response["usage"] = await self._told_usage()
        response["completed_at"] = int(time.time())
        response["store"] = self._keep(response)
        return response, events

    def _event(self, told: dict[str, Any]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({**told, "sequence_number": number}, told["type"])

    def _response(self, status: str, **changes: Any) -> dict[str, Any]:
        body, sampling = self._body, self._sampling
        told: dict[str, Any] = {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._server.model_name,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": self._told_format(), "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }
        return {**told, **changes}

    def _told_format(self) -> dict[str, Any]:
        form = None if self._body.text is None else self._body.text.format
        return {"type": "text"} if form is None else form.model_dump(exclude_none=True)

    async def _told_usage(self) -> dict[str, Any]:
        usage, num_reasoning = self._usage, 0
        if text := self._output.reasoning:  # as many tokens as its text has
            num_reasoning = len(await self._server.llm.encode(partial(self._server.tokenizer.encode, text, False)))
        return {
            "input_tokens": usage.num_prompt_tokens,
            # Writing to the cache costs nothing here, so nothing is counted for it.
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    def _logprobs(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        if not self._chat.logprobs:
            return []
        return logprobs.of_chat(
            choice.token_ids,
            choice.logprobs or [],
            self._chat.top_logprobs or 0,
            as_ids=False,
            tokenizer=self._server.tokenizer,
        )["content"]
