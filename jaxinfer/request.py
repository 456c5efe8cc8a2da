"""What a caller asks for and what comes back, and the host's state of a sequence between. Imports nothing heavy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_CHOICES = 128


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends; names and meanings as in vLLM.

    `temperature=0` takes the likeliest token. `top_k=0` (or -1), `top_p=1`, `min_p=0` keep every token. Without a
    `seed`, a request's randomness derives from the engine's seed and the order of arrival: equal prompts differ, and
    the same program run twice gives the same tokens.

    Raises:
        ValueError: a field out of its range, with the range.
    """

    n: int = 1
    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: Mapping[int, float | int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_number("n", 1, MAX_CHOICES, whole=True)
        self._check_number("temperature", 0, 100)
        self._check_number("top_k", -1, 2**31 - 1, whole=True)
        self._check_number("top_p", 0, 1, above=True)
        self._check_number("min_p", 0, 1)
        self._check_number("repetition_penalty", 0, 100, above=True)
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_number("min_tokens", 0, 2**31 - 1, whole=True)
        for name, low, high in (("seed", 0, 2**64 - 1), ("max_tokens", 1, 2**31 - 1), ("logprobs", 0, 20)):
            if getattr(self, name) is not None:
                self._check_number(name, low, high, whole=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(f"stop={self.stop!r} must be a string or strings, none of them empty")
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias[{token}]={bias} must be between -100 and 100")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be sampled; leave it out to allow all")

    def _check_number(
        self, name: str, low: float | int, high: float | int, whole: bool = False, above: bool = False
    ) -> None:
        value = getattr(self, name)
        kinds = int if whole else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not (low < value if above else low <= value) or value > high:
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{name}={value!r} must be {kind} {'above' if above else 'from'} {low} up to {high}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def uses_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability before any option changed it, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A request's prompt and its choices. `metrics` holds `ttft_s` and `e2e_s`, both from arrival."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        choices = ", ".join(
            f"{reprlib.repr(choice.text)} ({len(choice.token_ids)} tokens, {choice.finish_reason or 'unfinished'})"
            for choice in self.outputs[:3]
        )
        more = f", … {len(self.outputs)} choices" if len(self.outputs) > 3 else ""
        return f"RequestOutput({self.request_id!r}, {len(self.prompt_token_ids)} prompt tokens, [{choices}{more}])"


@dataclass(eq=False)
class SequenceState:
    """One choice while it runs: its tokens, how many of them are in the cache, and the pages and lane it holds."""

    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    lane: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start … end - 1 of prompt and output together, touching no others."""
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + self.output_ids[max(0, start - split) : max(0, end - split)]
