"""Prompts of the endpoints as token ids, encoded off the event loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxinfer.request import plain_ids
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from jaxinfer.serve.server import Server
from jaxinfer.serve.tools.definitions import ToolUse


async def of_completion(server: Server, body: CompletionRequest) -> list[tuple[str | None, list[int]]]:
    """The texts, where they are texts, and ids of a completion's prompts.

    Raises:
        ApiError: an empty or too long prompt.
    """
    return await each(server, body.prompt, "prompt", body.add_special_tokens, body.truncate_prompt_tokens)


async def each(
    server: Server, given: Any, field: str, special: bool | None = None, truncate: int | None = None
) -> list[tuple[str | None, list[int]]]:
    """The texts, where they are texts, and ids of what a field holds: one text or its ids, or a list of them.

    Raises:
        ApiError: one that is empty or too long, by its place.
    """
    many: list[Any] = [given] if isinstance(given, str) or _is_ids(given) else given
    if not many:
        raise ApiError(400, f"{field} is an empty list; give a text, token ids, or a list of them", param=field)
    prompts = []
    for index, one in enumerate(many):
        name = field if many is not given else f"{field}[{index}]"
        if isinstance(one, str):
            text, ids = one, await encode(server, one, name, special is not False)
        else:
            text, ids = None, plain_ids(name, one, server.llm.vocab_size)
        prompts.append((text, checked(server, ids, name, truncate)))
    return prompts


async def encode(server: Server, text: str, name: str, special: bool = True) -> list[int]:
    """The ids of a text. Raises `ApiError` naming its field where it is no text."""
    try:
        return await server.llm.encode(partial(server.tokenizer.encode, text, special))
    except ValueError as error:
        raise ApiError(400, f"{name}: {str(error).removeprefix('encode: ')}", param=name) from None


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


async def of_chat(server: Server, body: ChatRequest, use: ToolUse) -> list[int]:
    """The ids of a conversation. Raises `ApiError` where it is too long, `ValueError` for the template's reasons."""
    ids = await server.llm.encode(partial(render, server, body, use))
    return checked(server, ids, "messages", body.truncate_prompt_tokens)


def render(server: Server, body: ChatRequest | TokenizeRequest, use: ToolUse) -> list[int]:
    """What the chat template makes of a body's messages and tools."""
    variables = body.chat_template_kwargs or {}
    own = {"tokenize", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    if clash := sorted(own.intersection(variables)):
        raise ApiError(
            400, f"chat_template_kwargs: {clash[0]} cannot be set there", param=f"chat_template_kwargs.{clash[0]}"
        )
    messages, tools = server.dialect.for_template(body.messages, use)
    continues = body.continue_final_message is True
    generates = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    return server.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=generates,
        continue_final_message=continues,
        chat_template=server.config.chat_template,
        **variables,
    )


def checked(server: Server, ids: list[int], name: str, truncate: int | None = None) -> list[int]:
    """The ids, their last `truncate` where that is given (-1 is as many as fit).

    Raises:
        ApiError: there are none, or more than the model reads.
    """
    if truncate is not None:
        if truncate < 1 and truncate != -1:
            raise ApiError(
                400, f"truncate_prompt_tokens={truncate} must be at least 1, or -1", param="truncate_prompt_tokens"
            )
        ids = ids[-(truncate if truncate > 0 else server.max_model_len - 1) :]
    if not ids:
        raise ApiError(400, f"{name} is empty; give at least one token", param=name)
    if len(ids) > server.max_model_len:
        raise ApiError(
            400,
            f"{name} has {len(ids)} tokens and this model's context is {server.max_model_len}; shorten it",
            param=name,
            code="context_length_exceeded",
        )
    return ids
