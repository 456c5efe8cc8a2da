"""An engine for tests of what is read out of a model's text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from jaxinfer import AsyncLLM
from jaxinfer.request import CompletionOutput, RequestOutput


class Scripted(AsyncLLM):
    """An engine that says what it is told to, five characters at a time, and keeps the prompts that it is given."""

    def __init__(self, engine: Any) -> None:
        self.__dict__.update(engine.__dict__)  # but what it generates
        self.texts = [""]
        self.finish_reason = "stop"
        self.prompts: list[str] = []

    @property
    def max_model_len(self) -> int:
        return 1 << 16

    async def submit(
        self, prompt: Any, params: Any, request_id: str, *, output_kind: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = prompt["prompt_token_ids"]
        self.prompts.append(self.tokenizer.decode(ids))
        self.params = params
        return self._outputs(request_id, ids, 5 if output_kind == "delta" else 1 << 20)

    async def _outputs(self, request_id: str, ids: list[int], size: int) -> AsyncGenerator[RequestOutput, None]:
        longest = max(map(len, self.texts))
        for start in range(0, max(longest, 1), size):
            last = start + size >= longest
            choices = [
                CompletionOutput(index, text[start : start + size], [70], None, self.finish_reason if last else None)
                for index, text in enumerate(self.texts)
            ]
            num_generated = (start // size + 1) * len(choices)
            yield RequestOutput(request_id, None, ids, choices, last, num_generated_tokens=num_generated)
