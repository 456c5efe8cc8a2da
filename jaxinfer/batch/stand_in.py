"""A job without a model, to try or measure all that is beside one.

    python -m jaxinfer.batch.stand_in --input GLOB… --output DIR [flags of python -m jaxinfer.batch]

What the stand-in answers follows from the prompt's bytes and the sampling fields alone; it does nothing with the model
and the engine that the flags name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxinfer.batch.__main__ import main
from jaxinfer.batch.config import JobConfig, settings_of
from jaxinfer.batch.fingerprint import Fingerprint
from jaxinfer.batch.model import Model
from jaxinfer.batch.outputs import RESERVED
from jaxinfer.batch.requests import Requests
from jaxinfer.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.token_bytes import Family
from jaxinfer.tokenizer.tokenizer import TokenizerSpec

NUM_ROWS, TOKENS_PER_STEP = 64, 8


class StandIn:
    """Makes `tokens_per_step` tokens a step for each of at most `num_rows` requests, in order of arrival."""

    def __init__(self, num_rows: int = 8, tokens_per_step: int = 4, max_model_len: int = 10_000):
        self.num_rows = num_rows
        self.tokens_per_step = tokens_per_step
        self.max_model_len = max_model_len
        self.num_added = 0
        self.most_at_once = 0
        self._left: dict[str, tuple[list[int], SamplingParams, int]] = {}

    def add(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens; max_model_len={self.max_model_len}")
        assert request_id not in self._left
        self._left[request_id] = list(prompt_ids), params, params.max_tokens or 0
        self.num_added += 1
        self.most_at_once = max(self.most_at_once, len(self._left))

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[tuple[RequestOutput, list[str]]]:
        ended = []
        for request_id in list(self._left)[: self.num_rows]:
            ids, params, left = self._left[request_id]
            left -= self.tokens_per_step
            if left > 0:
                self._left[request_id] = ids, params, left
            else:
                del self._left[request_id]
                ended.append((answer(request_id, ids, params), [""] * params.n))
        return ended

    def stats(self) -> dict[str, float | int]:
        return {"prefix_cache_hit_rate": 0.25}


def answer(request_id: str, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    """What the engine says to a prompt."""
    choices = [_choice(ids, params, index) for index in range(params.n)]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return RequestOutput(request_id, None, list(ids), choices, True, num_generated_tokens=num_tokens)


def _choice(ids: Sequence[int], params: SamplingParams, index: int) -> CompletionOutput:
    asked = repr((list(ids), params.seed, params.temperature, index)).encode()
    drawn = hashlib.shake_128(asked).digest(params.max_tokens or 1)
    tokens = [97 + byte % 26 for byte in drawn]
    logprobs = [-byte / 16 for byte in drawn]
    places: Any = None
    if params.logprobs is not None:
        places = [{token: Logprob(value, 1, chr(token))} for token, value in zip(tokens, logprobs, strict=True)]
    return CompletionOutput(
        index, "".join(map(chr, tokens)), tokens, places, "length", cumulative_logprob=sum(logprobs)
    )


class _Bytes(Tokenizer):
    """Each byte of a text is a token."""

    def __init__(self) -> None:
        import tokenizers

        spec = TokenizerSpec("bytes", Family.BYTE_LEVEL, frozenset(), frozenset())
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), spec, 256, chr)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@contextlib.contextmanager
def open_stand_in(config: JobConfig) -> Iterator[Model]:
    """In place of `jaxinfer.batch.model.open_llm`."""
    engine = StandIn(NUM_ROWS, TOKENS_PER_STEP)
    requests = Requests(config, _Bytes(), {}, engine.max_model_len, 256, RESERVED)
    yield Model(engine, requests, Fingerprint(settings_of(config), {"model": "stand-in"}, {}), 2 * NUM_ROWS)


if __name__ == "__main__":
    raise SystemExit(main(open_model=open_stand_in))
