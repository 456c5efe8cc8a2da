"""How many tokens a request took."""

from __future__ import annotations

from typing import Any

from jaxinfer.request import RequestOutput


class Usage:
    """Counts the tokens of a request's prompts and choices, from whole outputs or from deltas."""

    def __init__(self, num_prompts: int):
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self._generated_tokens = [0] * num_prompts

    def add(self, index: int, output: RequestOutput) -> None:
        """Take an output of a prompt: all of it, or what is new."""
        self._prompt_tokens[index] = len(output.prompt_token_ids)
        self._cached_tokens[index] = output.num_cached_tokens
        self._generated_tokens[index] = output.num_generated_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those found in the prefix cache."""
        return sum(self._cached_tokens)

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices, those that `best_of` leaves out among them."""
        return sum(self._generated_tokens)

    def of_all(self) -> dict[str, Any]:
        """In the shape of the OpenAI API."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def of_chunk(self, options: Any) -> dict[str, Any]:
        """What a chunk with text tells, by the stream's options: clients that ask for usage find the key in each."""
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return {}
        return {"usage": self.of_all() if options.continuous_usage_stats else None}
