"""What the endpoints share: the engine, the settings, who may enter, and one request's way to the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.token_mask import is_of_options
from jaxinfer.mailbox import OutputKind
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.serve.admission import Admission
from jaxinfer.serve.config import ServerConfig
from jaxinfer.serve.dialect import Dialect
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.request_log import RequestRecord
from jaxinfer.serve.responses.store import ResponseStore
from jaxinfer.serve.schemas import GenerationBody
from jaxinfer.serve.sse import unless_gone
from jaxinfer.serve.tracing import Tracer
from jaxinfer.tokenizer import Tokenizer

MAX_PRIORITY = 1_000_000
"""Requests may ask for a priority from minus this up to this."""
OFFLINE_PRIORITY = 1 << 30
"""What is added to the priority of a request of a batch, so that it comes after every other one."""


class Server:
    """One model behind HTTP. `model_names` are those that requests may call it by, the first the one it tells."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model_names: Sequence[str]):
        self.llm = llm
        self.config = config
        self.model_names = tuple(model_names)
        self.created_s = int(time.time())
        self.max_model_len = llm.max_model_len
        self.admission = Admission(llm.max_num_seqs + config.max_queue_len, config.max_requests_per_tenant)
        self.responses = ResponseStore(config.max_stored_responses, config.max_responses_bytes)
        self.tracer: Tracer | None = None
        self.dialect = Dialect(llm.tokenizer, config.chat_template, config.tool_call_parser, config.reasoning_parser)
        self._running: set[str] = set()

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def state(self) -> str:
        """ "ready" while requests are taken, "draining" before the end, "dead" where the engine cannot go on."""
        return "draining" if self.admission.draining else "dead" if self.llm.failure is not None else "ready"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise the 404 for a model that is not here. None is the one that is."""
        if name is not None and name not in self.model_names:
            here = ", ".join(self.model_names)
            raise ApiError(
                404, f"model {name!r:.100} is not served here; there is {here}", param="model", code="model_not_found"
            )

    async def abort_all(self) -> None:
        """End what runs: its clients get what there is, with finish_reason "abort"."""
        await asyncio.gather(*(self.llm.abort(request_id) for request_id in self._running))

    @contextmanager
    def hold(self, call: Call, num_prompts: int, num_sequences: int) -> Iterator[None]:
        """The places of a call while the body runs, and its requests in the engine among those that `abort_all` ends.

        An offline call takes none of the places: who makes it bounds it, and ends it.

        Raises:
            ApiError: there is no room.
        """
        if call.offline:
            yield
            return
        request_ids = [call.id_of(index) for index in range(num_prompts)]
        with self.admission.enter(call.tenant, num_sequences):
            self._running.update(request_ids)
            try:
                yield
            finally:
                self._running.difference_update(request_ids)

    async def submit(
        self, call: Call, index: int, prompt: Prompt, output_kind: OutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        """One of a call's prompts, given to the engine as the call says. Raises what the engine has against it."""
        return await self.llm.submit(
            {"prompt_token_ids": prompt.token_ids, "cache_salt": call.cache_salt},
            prompt.params,
            call.id_of(index),
            output_kind=output_kind,
            priority=call.priority,
            tenant=call.tenant,
            timeout_s=call.timeout_s,
        )

    async def open(self, call: Call, prompts: Sequence[Prompt], output_kind: OutputKind) -> Generation:
        """Bring prompts to the engine as one request. Close what comes back.

        Raises:
            ApiError: there is no room.
            ValueError: the engine refuses one of them; none runs then.
        """
        generation = Generation(call)
        try:
            await generation.start(self, prompts, output_kind)
        except BaseException:
            await generation.close()
            raise
        return generation


@dataclass(frozen=True)
class Prompt:
    """Token ids and how to go on from them; `text` is what they were encoded from, where it was a text."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


@dataclass(frozen=True)
class Call:
    """One HTTP request that generates: its id in answers, and how the engine is to serve it."""

    id: str
    created_s: int
    tenant: str
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | int | None = None
    record: RequestRecord | None = field(default=None, compare=False)
    offline: bool = False

    @classmethod
    def of(cls, request: Request, body: GenerationBody, prefix: str) -> Call:
        """The call that a body makes; see `make`."""
        named = body.user or body.safety_identifier
        return cls.make(request, prefix, named, body.priority, body.cache_salt, body.timeout_s, bool(body.stream))

    @classmethod
    def make(
        cls,
        request: Request,
        prefix: str,
        named: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        timeout_s: float | int | None = None,
        stream: bool = False,
    ) -> Call:
        """A call with what its body asks for. The tenant is the API key's owner, or `named` where keys do not say.

        A request of a batch comes after all others, and has no time limit but its own.

        Raises:
            ApiError: a priority out of its range.
        """
        priority = priority or 0
        if abs(priority) > MAX_PRIORITY:
            message = f"priority={priority} must be from -{MAX_PRIORITY} up to {MAX_PRIORITY}"
            raise ApiError(400, message, param="priority")
        server: Server = request.app.state.server
        offline = bool(getattr(request.state, "offline", False))
        limit_s = None if offline else server.config.request_timeout_s
        given_s = timeout_s if timeout_s is not None else limit_s
        tenant = tenant_of(request, named)
        record: RequestRecord | None = request.scope["state"].get("record")
        if record is not None:
            record.model, record.tenant, record.stream = server.model_name, tenant, stream
        return cls(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            f"batch/{tenant}" if offline else tenant,
            priority + OFFLINE_PRIORITY if offline else priority,
            cache_salt or "",
            given_s if limit_s is None or given_s is None else min(given_s, limit_s),
            record,
            offline,
        )

    def id_of(self, index: int) -> str:
        """The engine's name for one of the call's prompts."""
        return f"{self.id}-{index}"

    def describe(self, server: Server, prompts: Sequence[Prompt]) -> None:
        """Tell the access log of the call's prompts."""
        if (record := self.record) is None:
            return
        for prompt in prompts:
            record.begin(prompt.params, len(prompt.token_ids))
        if server.config.log_prompts:
            record.prompt = [
                server.tokenizer.decode(each.token_ids) if each.text is None else each.text for each in prompts
            ]

    def noted(self, output: RequestOutput) -> RequestOutput:
        """An output that the access log has been told of. Raises `ApiError` for a choice that failed."""
        if self.record is not None:
            self.record.note(output)
        return checked(output)


def tenant_of(request: Request, named: str | None) -> str:
    """Whom a request counts for: the owner of its API key, else whom it names, else nobody in particular."""
    return getattr(request.state, "key_owner", None) or named or ""


class Generation:
    """The engine's part of one HTTP request: one or more prompts, whose outputs come as (index of the prompt, output).

    Closing it, finished or not, frees what it holds in the engine before the next step.
    """

    def __init__(self, call: Call):
        self.call = call
        self._held = AsyncExitStack()
        self._streams: list[AsyncGenerator[RequestOutput, None]] = []
        self._ended: set[tuple[int, int]] = set()

    async def start(self, server: Server, prompts: Sequence[Prompt], output_kind: OutputKind) -> None:
        """See `Server.open`."""
        call = self.call
        call.describe(server, prompts)
        num_sequences = sum(prompt.params.num_choices for prompt in prompts)
        self._held.enter_context(server.hold(call, len(prompts), num_sequences))
        submitted = await asyncio.gather(
            *(server.submit(call, index, prompt, output_kind) for index, prompt in enumerate(prompts)),
            return_exceptions=True,
        )
        self._streams = [each for each in submitted if not isinstance(each, BaseException)]
        for stream in self._streams:
            self._held.push_async_callback(stream.aclose)
        for each in submitted:
            if isinstance(each, BaseException):
                raise each

    def _news(self, index: int, output: RequestOutput) -> RequestOutput:
        """An output of a prompt without the choices whose end has been told: it is told once."""
        output = self.call.noted(output)
        output.outputs = [choice for choice in output.outputs if (index, choice.index) not in self._ended]
        self._ended.update((index, choice.index) for choice in output.outputs if choice.finish_reason is not None)
        return output

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What the prompts' streams give, as it comes. Raises `ApiError` where one fails."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, self._news(0, output)
            return
        queue: asyncio.Queue[Any] = asyncio.Queue(1)  # what waits meanwhile stays in the engine's mailboxes

        async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
            try:
                async for output in stream:
                    await queue.put((index, output))
            except Exception as error:
                await queue.put((index, error))
            else:
                await queue.put((index, None))

        pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(self._streams)]
        left = len(pumps)
        try:
            while left:
                index, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield index, self._news(index, item)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def finals(self) -> list[RequestOutput]:
        """The whole outputs, in the order of the prompts; for kind "final"."""
        found = {index: output async for index, output in self.outputs()}
        if len(found) < len(self._streams):
            raise ApiError(503, "the request was aborted before it began", code="aborted")
        return [found[index] for index in range(len(self._streams))]

    async def close(self) -> None:
        """Give back what the request holds."""
        if self.call.record is not None:
            self.call.record.end()
        await self._held.aclose()


async def finals(request: Request, generation: Generation) -> list[RequestOutput]:
    """A generation's whole outputs, after which it is closed; given up when the client goes, with `ClientGone`."""
    try:
        return await unless_gone(request, generation.finals())
    finally:
        await generation.close()


def checked(output: RequestOutput) -> RequestOutput:
    """Raise `ApiError` for a choice that failed; what it asked for is at fault where no token was allowed."""
    for choice in output.outputs:
        if choice.finish_reason == "error":
            reason = str(choice.stop_reason)
            if is_of_options(reason):
                raise ApiError(400, f"the request cannot go on: {reason}", code="no_token_allowed")
            raise ApiError(500, "the request failed in the engine; the server's log has the details", code="failed")
    return output
