"""How likely given continuations are, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.request import Logprob, SamplingParams
from jaxinfer.tokenizer import Tokenizer

SCORE_PARAMS = SamplingParams(max_tokens=0, prompt_logprobs=0)
"""Reads the prompt and draws nothing."""


@dataclass(frozen=True)
class ContinuationScore:
    """`logprob` is the sum of `token_logprobs`, natural logarithms; `is_greedy` where each token was the likeliest."""

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]


def join(tokenizer: Tokenizer, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[list[int], int]:
    """The tokens of prompt and continuation together, and the position of the first that the continuation has part in.

    Two texts are cut into tokens as one: a token across the boundary is the continuation's, so that the score is that
    of the text as the model would read it.

    Raises:
        ValueError: nothing to score, or no token before it.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        alone, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + continuation)
        first = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids)))
        if alone and not first:  # the whole prompt merged into the first token of the continuation
            ids, first = [*alone, *tokenizer.encode(continuation, add_special_tokens=False)], len(alone)
    else:
        head = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if isinstance(continuation, str):
            continuation = tokenizer.encode(continuation, add_special_tokens=False)
        ids, first = [*head, *continuation], len(head)
    if first == len(ids):
        raise ValueError("continuation is empty: there is nothing to score")
    if first == 0:
        raise ValueError(
            "prompt is empty: give at least one token, the model's bos or eos, for a continuation to follow"
        )
    return ids, first


def score_of(entries: Sequence[dict[int, Logprob] | None], ids: Sequence[int], first: int) -> ContinuationScore:
    """The score of tokens `first` … of a prompt from its `prompt_logprobs`."""
    found = [entry[token] for entry, token in zip(entries[first:], ids[first:], strict=True) if entry is not None]
    logprobs = [each.logprob for each in found]
    return ContinuationScore(sum(logprobs), all(each.rank == 1 for each in found), list(ids[first:]), logprobs)
