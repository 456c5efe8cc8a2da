"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.request import Logprob
from jaxinfer.tokenizer import Tokenizer

Entry = dict[int, Logprob]


def _name(token: int, logprob: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else logprob.decoded_token


def of_completion(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    num_top: int,
    *,
    offset: int,
    as_ids: bool,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Parallel lists a token. `offset` is that of the first token's text; None is the entry of a prompt's first token.

    Where two of the likeliest tokens have one text, as pieces of characters do, the likelier one is kept.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(token_ids, entries, strict=True):
        text = tokenizer.token_text(token)
        found["tokens"].append(f"token_id:{token}" if as_ids else text)
        found["token_logprobs"].append(None if entry is None else entry[token].logprob)
        top: dict[str, float] | None = None
        if entry is not None:
            top = {}
            for other, logprob in _likeliest(entry, num_top):
                top.setdefault(_name(other, logprob, as_ids), logprob.logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def of_chat(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, *, as_ids: bool, tokenizer: Tokenizer
) -> dict[str, Any]:
    """One object a token, with its bytes, which of pieces of characters tell more than the text."""

    def described(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": _name(token, logprob, as_ids),
            "logprob": logprob.logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = [
        {
            **described(token, entry[token]),
            "top_logprobs": [described(*each) for each in _likeliest(entry, num_top)],
        }
        for token, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_prompt(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        for entry in entries
    ]


def _likeliest(entry: Entry, num_top: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda each: each[1].rank)[:num_top]
