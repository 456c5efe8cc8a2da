"""The forms in which callers give a prompt, and what they ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.request import RequestOptions, SamplingParams, plain_ids

Prompt = str | Mapping[str, Any]
Request = tuple[str | None, list[int], SamplingParams, RequestOptions]
"""A prompt's text, its token ids, and what is asked of it."""


def prompt_content(prompt: Any) -> str | list[int]:
    """A prompt's text or token ids. Raises `ValueError` for one that has neither."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}, key=str):
            raise ValueError(f"prompt: {unknown[0]!r} is not supported; a prompt needs 'prompt' or 'prompt_token_ids'")
        if prompt.get("prompt_token_ids") is not None:
            return plain_ids("prompt_token_ids", prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"]
        raise ValueError(f"a prompt needs 'prompt' (text) or 'prompt_token_ids'; got the keys {list(prompt)}")
    raise ValueError(f"a prompt is a text or a mapping with 'prompt' or 'prompt_token_ids', not {prompt!r:.60}")


def prompt_salt(prompt: Prompt) -> Any:
    return prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""


def options_of(count: int, priority: Any, tenant: Any, timeout_s: Any, cache_salt: Any) -> list[RequestOptions]:
    """Each request's options, from one value for all of them or a list with one for each."""
    given = {"priority": priority, "tenant": tenant, "cache_salt": cache_salt}
    columns = []
    for name, values in given.items():
        single = isinstance(values, str) or not isinstance(values, Sequence)
        if not single and len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
        columns.append([values] * count if single else values)
    return [RequestOptions(one, two, three, timeout_s) for one, two, three in zip(*columns, strict=True)]
