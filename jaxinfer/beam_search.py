"""Beam search: the likeliest continuations of a prompt, a token at a time, on requests that fork one another.

Each step asks the engine for one token after every beam of every prompt, and for the likeliest log-probabilities.
A request for `prompt + tokens so far` finds all but its last token in the prefix cache: a fork shares its parent's full
pages and copies the page in which it ends, so a step computes one token a beam.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.prompts import Request
from jaxinfer.request import MAX_LOGPROBS, CompletionOutput, Logprob, RequestOptions, RequestOutput, SamplingParams
from jaxinfer.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10


@dataclass(frozen=True)
class BeamSearchParams:
    """What a beam search looks for; names and meanings as in vLLM.

    beam_width: beams that go on from each step, and that are returned: at most 10, since a step takes
        2·beam_width continuations of each.
    max_tokens: most tokens of a beam after the prompt.
    ignore_eos: the model's end of text is a token like others; no beam ends before max_tokens.
    temperature: 0 and 1 are the model's own log-probabilities; others those of softmax(logits / temperature). No
        token is drawn at random.
    length_penalty: a beam's score is its log-probability / tokens ** length_penalty, where tokens counts the prompt but
        not the end of text: above 0 it favours long beams, at 0 it does nothing.
    include_stop_str_in_output: the text shows the end of text with which a beam ended; its tokens always do.

    Raises:
        ValueError: a field out of its range, with what is allowed.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float | int = 0.0
    length_penalty: float | int = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("beam_width", 1, MAX_BEAM_WIDTH), ("max_tokens", 1, 2**31 - 1)):
            self._check(name, Integral, low, high)
        for name, low, high in (
            ("temperature", 0, 100),
            ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        ):
            self._check(name, Real, low, high)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r:.60} must be True or False")

    def _check(self, name: str, kind: type, low: int, high: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            what = "a whole number" if kind is Integral else "a number"
            raise ValueError(f"{name}={value!r:.60} must be {what} from {low} up to {high}")


@dataclass
class BeamSearchSequence:
    """A beam. `tokens` and `text` begin with the prompt's; `logprobs` has an entry for each token after it.

    `cum_logprob` sums those tokens' log-probabilities. `finish_reason` is "stop" after the model's end of text,
    "length" at max_tokens or the model's limit, or "error" with the reason in `stop_reason`.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """A prompt's beams, that of the highest score first."""

    sequences: list[BeamSearchSequence]


class _Candidate(NamedTuple):
    """A beam with one token more."""

    cum_logprob: float
    beam: BeamSearchSequence
    token: int
    entry: dict[int, Logprob]

    def grown(self) -> BeamSearchSequence:
        beam = self.beam
        return BeamSearchSequence([*beam.tokens, self.token], [*beam.logprobs, self.entry], self.cum_logprob)


class _Search:
    """One prompt's search: the beams that go on, and the best of those that have ended."""

    def __init__(self, prompt_ids: list[int], params: BeamSearchParams, eos_ids: frozenset[int], max_total_tokens: int):
        self.params = params
        self.beams = [BeamSearchSequence(list(prompt_ids))]
        self.ended: list[BeamSearchSequence] = []
        self._eos_ids = eos_ids
        self.max_total_tokens = max_total_tokens

    def take(self, outputs: Sequence[CompletionOutput]) -> None:
        """Take a step, from one token of each beam."""
        found: list[_Candidate] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            if output.finish_reason == "error":
                self.ended.append(replace(beam, finish_reason="error", stop_reason=str(output.stop_reason)))
                continue
            entry = _logprobs(output, self.params.temperature)
            likely = ((token, each.logprob) for token, each in entry.items() if each.logprob > -math.inf)
            found += [_Candidate(beam.cum_logprob + logprob, beam, token, entry) for token, logprob in likely]
        ends = [each for each in found if each.token in self._eos_ids]
        goes_on = [each for each in found if each.token not in self._eos_ids]
        self.ended += [replace(each.grown(), finish_reason="stop") for each in ends]
        width = self.params.beam_width
        self.beams = [each.grown() for each in heapq.nlargest(width, goes_on, key=lambda each: each.cum_logprob)]
        if self.beams and len(self.beams[0].tokens) >= self.max_total_tokens:
            self.ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []
        self.ended = heapq.nlargest(width, self.ended, key=self._score)
        if self._decided():
            self.beams = []

    def _score(self, beam: BeamSearchSequence) -> float:
        if beam.finish_reason == "error":
            return -math.inf
        return beam.cum_logprob / (len(beam.tokens) - (beam.finish_reason == "stop")) ** self.params.length_penalty

    def _decided(self) -> bool:
        """Whether no beam that goes on can come among the best any more: its log-probability can only fall."""
        if not self.beams or len(self.ended) < self.params.beam_width:
            return not self.beams
        best, penalty = self.beams[0], self.params.length_penalty
        length = self.max_total_tokens if penalty > 0 else len(best.tokens)  # whichever gives the higher score
        return best.cum_logprob / length**penalty <= self._score(self.ended[-1])

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        for beam in self.ended:
            hidden = beam.finish_reason == "stop" and not self.params.include_stop_str_in_output
            beam.text = tokenizer.decode(beam.tokens[:-1] if hidden else beam.tokens)
        return BeamSearchOutput(self.ended)


def search(
    engine: Engine,
    run: Callable[[list[Request]], list[RequestOutput]],
    prompts: Sequence[tuple[list[int], str]],
    params: BeamSearchParams,
    show_step: Callable[[], object] = lambda: None,
) -> list[BeamSearchOutput]:
    """Search on from every prompt, token ids and a cache salt, at once. `run` has the engine complete requests.

    Beams that end leave with their scores; the search of a prompt is over where none that goes on can come among the
    best beam_width of them, or after max_tokens.

    Raises:
        TypeError: params of another kind.
        ValueError: a beam that the cache could not hold; what `run` raises.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params={params!r:.60} must be a BeamSearchParams")
    tokenizer, limit = engine.tokenizer, engine.config.scheduler.max_model_len
    eos_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
    searches = [_Search(ids, params, eos_ids, min(limit, len(ids) + params.max_tokens)) for ids, _ in prompts]
    for each in searches:
        engine.scheduler.check_fits(each.max_total_tokens)
    options = [RequestOptions(cache_salt=salt) for _, salt in prompts]
    one_token = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=2 * params.beam_width,
        return_logits=not _is_plain(params.temperature),
    )
    while any(each.beams for each in searches):
        requests: list[Request] = [
            (None, beam.tokens, one_token, option)
            for each, option in zip(searches, options, strict=True)
            for beam in each.beams
        ]
        outputs = iter(run(requests))
        for each in searches:
            if each.beams:
                each.take([next(outputs).outputs[0] for _ in each.beams])
        show_step()
    return [each.output(tokenizer) for each in searches]


def _logprobs(output: CompletionOutput, temperature: float | int) -> dict[int, Logprob]:
    """The likeliest continuations, by the log-probabilities of softmax(logits / temperature)."""
    assert output.logprobs is not None
    (entry,) = output.logprobs
    if _is_plain(temperature):
        return entry
    logits = output.logits[0].astype(np.float64) / temperature
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    return {token: replace(each, logprob=float(logits[token])) for token, each in entry.items()}


def _is_plain(temperature: float | int) -> bool:
    return temperature in (0, 1)
