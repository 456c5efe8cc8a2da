"""Requests of any number of prompts, of which each is read once and drawn from never: embeddings and scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from jaxinfer.request import RequestOutput
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.server import Call, Prompt, Server


async def outputs(server: Server, call: Call, prompts: Sequence[Prompt]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The whole output of each prompt with its index, as they finish.

    No more prompts are in the engine, and no more places taken, than sequences run at once: what is kept of each, such
    as hidden states, is bounded by that. Closing it ends what runs.

    Raises:
        ApiError: there is no room, or a prompt was not read to its end.
        ValueError: the engine refuses a prompt.
    """
    call.describe(server, prompts)
    width = min(len(prompts), server.llm.max_num_seqs)
    waiting = iter(enumerate(prompts))
    running: set[asyncio.Task[tuple[int, RequestOutput]]] = set()
    with server.hold(call, len(prompts), width):
        try:
            while True:
                while len(running) < width and (following := next(waiting, None)) is not None:
                    running.add(asyncio.create_task(_one(server, call, *following)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _one(server: Server, call: Call, index: int, prompt: Prompt) -> tuple[int, RequestOutput]:
    stream = await server.submit(call, index, prompt, "final")
    async for output in stream:
        reason = call.noted(output).outputs[0].finish_reason
        if reason == "timeout":
            raise ApiError(408, f"the request was not done within {call.timeout_s:g} s", code="timeout")
        if reason != "abort":
            return index, output
    raise ApiError(503, "the request was aborted before it was done", code="aborted")
