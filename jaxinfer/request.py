"""What a caller asks for and what comes back, and the host's state of a sequence between. Imports nothing heavy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from jaxinfer.structured.params import StructuredOutputsParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends; names and meanings as in vLLM.

    `temperature=0` takes the likeliest token. `top_k=0` (or -1), `top_p=1`, `min_p=0`, `typical_p=1` keep every token.
    Without a `seed`, a request's randomness derives from the engine's seed and the order of arrival: equal prompts
    differ, and the same program run twice gives the same tokens.

    n, best_of: `best_of` choices are made and the `n` with the highest mean log-probability a token are returned.
    typical_p: Meister et al. 2023, "Locally Typical Sampling".
    bad_words: strings that the output text never contains, however they would be cut into tokens.
    prompt_logprobs: log-probabilities of the prompt's own tokens and this many of the likeliest at each place.
    max_tokens: None is up to the model's limit; 0 only reads the prompt, for `prompt_logprobs` and hidden states.
    logits_processors: the processors given to `LLM(logits_processors=…)` that this request uses, by name; a mapping
        sets their parameters, `{"name": {"parameter": 1.5}}`.
    structured_outputs: the form of the output, such as a JSON schema; the tokens that fit no such text are not drawn.
    return_hidden_states: the last layer's normalised states, of the prompt and of each token drawn.
    return_logits: the raw float32 logits that each token was drawn from.

    Raises:
        ValueError: a field that is unknown or out of its range, with what is allowed.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    typical_p: float | int = 1.0
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: Mapping[int, float | int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Mapping[str, Mapping[str, float | int]] | Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    return_hidden_states: bool = False
    return_logits: bool = False

    if not TYPE_CHECKING:  # checkers read the fields

        def __new__(cls, *values: Any, **named: Any) -> SamplingParams:
            for name, value in named.items():
                if name not in cls.__dataclass_fields__:
                    known = list(cls.__dataclass_fields__)
                    close = difflib.get_close_matches(name, known, 1)
                    remedy = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
                    raise ValueError(f"{name}={value!r} is no sampling field; {remedy}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_number("n", 1, MAX_CHOICES, whole=True)
        self._check_number("temperature", 0, 100)
        self._check_number("top_k", -1, 2**31 - 1, whole=True)
        self._check_number("top_p", 0, 1, above=True)
        self._check_number("min_p", 0, 1)
        self._check_number("typical_p", 0, 1, above=True)
        self._check_number("repetition_penalty", 0.001, 100)
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_number("min_tokens", 0, 2**31 - 1, whole=True)
        for name, low, high in (
            ("seed", 0, 2**64 - 1),
            ("max_tokens", 0, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("best_of", self.n, MAX_CHOICES),
        ):
            if getattr(self, name) is not None:
                self._check_number(name, low, high, whole=True)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "return_hidden_states",
            "return_logits",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        self._check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self._check_strings("bad_words", self.bad_words)
        for name in ("allowed_token_ids", "stop_token_ids"):
            if (ids := getattr(self, name)) is not None:
                self._set(name, plain_ids(name, ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be sampled; leave it out to allow all")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(f"structured_outputs={self.structured_outputs!r:.60} must be a StructuredOutputsParams")
        if self.logit_bias is not None:
            self._set("logit_bias", _plain_bias(self.logit_bias))
        if self.logits_processors is not None:
            self._set("logits_processors", _plain_processors(self.logits_processors))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_strings(self, name: str, texts: Any) -> None:
        good = texts is None or (isinstance(texts, Sequence) and not isinstance(texts, str))
        if not good or any(not isinstance(text, str) or not text or not _is_unicode(text) for text in texts or ()):
            raise ValueError(
                f"{name}={reprlib.repr(getattr(self, name))} must be a list of strings, none of them empty"
            )

    def _check_number(
        self, name: str, low: float | int, high: float | int, whole: bool = False, above: bool = False
    ) -> None:
        value: Any = getattr(self, name)
        good = _is_whole(value) if whole else _is_real(value)
        if not good or not (low < value if above else low <= value) or not value <= high:
            kind = "a whole number" if whole else "a number"
            shown = repr(value) if not isinstance(value, int) or abs(value) < 2**70 else "a huge number"
            raise ValueError(f"{name}={shown} must be {kind} {'above' if above else 'from'} {low} up to {high}")
        self._set(name, int(value) if whole else float(value))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        """Sequences that run for the request."""
        return self.best_of or self.n

    @property
    def processor_params(self) -> Mapping[str, Mapping[str, float | int]]:
        """The processors in use, each with the parameters that the request sets."""
        return self.logits_processors if isinstance(self.logits_processors, Mapping) else {}

    @property
    def uses_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def plain_ids(name: str, ids: Any, vocab_size: int | None = None) -> list[int]:
    """Token ids as Python integers.

    Raises:
        ValueError: what is given is no list of ids, or one of them is no whole number from 0 up and below `vocab_size`.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"{name}={ids!r:.60} must be a list of token ids")
    # Many may come: without a loop of Python's where all is well.
    if (
        type(ids) is list
        and set(map(type, ids)) == {int}
        and min(ids) >= 0
        and (vocab_size is None or max(ids) < vocab_size)
    ):
        return ids.copy()
    plain = []
    for token in ids:
        if not _is_whole(token) or token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "" if vocab_size is None else f" below the vocabulary's {vocab_size}"
            raise ValueError(f"{name}: token id {token!r:.60} is not a whole number{limit or ' from 0 up'}")
        plain.append(int(token))
    return plain


def _plain_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={bias!r:.60} must map token ids to numbers")
    plain: dict[int, float] = {}
    tokens = [int(token) if isinstance(token, str) and token.isdecimal() else token for token in bias]  # JSON's keys
    for token, value in zip(plain_ids("logit_bias", tokens), bias.values(), strict=True):
        if not _is_real(value) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias[{token}]={value!r} must be a number between -100 and 100")
        plain[token] = float(value)
    return plain


def _plain_processors(used: Any) -> dict[str, dict[str, float]]:
    if isinstance(used, Sequence) and not isinstance(used, str):
        used = {name: {} for name in used}
    if not isinstance(used, Mapping):
        raise ValueError(f"logits_processors={used!r:.60} must be a list of names, or a mapping of names to parameters")
    plain: dict[str, dict[str, float]] = {}
    for name, values in used.items():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            raise ValueError(f"logits_processors[{name!r}]={values!r:.60} must map parameters to numbers")
        for parameter, value in values.items():
            if not _is_real(value) or not abs(value) < float("inf"):
                raise ValueError(f"logits_processors[{name!r}][{parameter!r}]={value!r} must be a finite number")
        plain[name] = {parameter: float(value) for parameter, value in values.items()}
    return plain


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_real(value: Any) -> bool:
    # Asking an abstract class takes longer than all else that is checked of a number.
    return type(value) in (float, int) or (isinstance(value, Real) and not isinstance(value, bool))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability before any option changed it, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice of a request.

    `finish_reason` is "stop" (`stop_reason` then holds the stop string or stop token id, None for the model's own end),
    "length", "timeout", "abort" (in `AsyncLLM`), "error" with the reason in `stop_reason`; None while the choice runs.
    `cumulative_logprob` sums the log-probabilities of its tokens. `hidden_states` [num_tokens, D] and `logits`
    [num_tokens, V] belong to `return_hidden_states` and `return_logits`: row k is what token k was drawn from.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0
    hidden_states: Any = field(default=None, repr=False)
    logits: Any = field(default=None, repr=False)


@dataclass
class RequestOutput:
    """A request's prompt and its choices.

    `metrics` holds seconds from arrival: `queue_s` until it first ran, `ttft_s` until a token came, `e2e_s` until its
    end; each once that has happened.

    `prompt_logprobs` has an entry for each token of the prompt, None for the first, which nothing precedes.
    `prompt_hidden_states` is [num_prompt_tokens, D]. `num_cached_tokens` of the prompt were found in the prefix cache.
    `num_generated_tokens` counts those of choices that `best_of` leaves out too.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_hidden_states: Any = field(default=None, repr=False)
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def __repr__(self) -> str:
        choices = ", ".join(
            f"{reprlib.repr(choice.text)} ({len(choice.token_ids)} tokens, {choice.finish_reason or 'unfinished'})"
            for choice in self.outputs[:3]
        )
        more = f", … {len(self.outputs)} choices" if len(self.outputs) > 3 else ""
        return f"RequestOutput({self.request_id!r}, {len(self.prompt_token_ids)} prompt tokens, [{choices}{more}])"


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served, beside what it asks for.

    priority: lower goes first; a request preempts those of a higher number where rows or pages are short.
    tenant: who shares the engine fairly with other tenants (`LLM(tenant_weights=…)`).
    cache_salt: only requests of the same salt share cached prefixes.
    timeout_s: seconds from arrival after which the request ends with what it has, finish_reason "timeout".

    Raises:
        ValueError: a field out of its range.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.priority) or not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority={self.priority!r:.60} must be a whole number of 32 bits")
        for name in ("tenant", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r:.60} must be a string")
        timeout_s: Any = self.timeout_s
        if timeout_s is not None and (not _is_real(timeout_s) or not 0 < timeout_s <= 10**9):
            raise ValueError(f"timeout_s={timeout_s!r:.60} must be a number of seconds above 0, or None")


DEFAULT_OPTIONS = RequestOptions()


@dataclass(eq=False)
class SequenceState:
    """One choice while it runs: its tokens, how many of them are in the cache, the pages and the lane it holds.

    `num_pending` tokens at its end have been sampled on the device and not been read by the host.
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    arrival: int = 0
    options: RequestOptions = DEFAULT_OPTIONS
    reads_prompt: bool = False  # all of the prompt is computed, since something is wanted of every position
    output_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache, before any preemption
    num_preemptions: int = 0
    num_passed: int = 0  # requests that came later and were admitted first
    num_charged: int = 0  # leading tokens that the tenant's counter has been charged for
    lane: int = -1
    pages: list[int] = field(default_factory=list)  # 0 where a page behind the window was given back
    nodes: list[Any] = field(default_factory=list)  # of the prefix tree, for the leading pages
    num_dropped: int = 0  # leading pages that were given back
    copy_from: tuple[Any, int, int] | None = None  # a node, how many of its tokens are to be copied, into which page

    @property
    def order(self) -> tuple[int, int]:
        """Place in order of arrival."""
        return self.arrival, self.index

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who gives way: of two sequences that need one page, the one of higher rank."""
        return self.options.priority, self.arrival, self.index

    @property
    def priority(self) -> int:
        return self.options.priority

    @property
    def tenant(self) -> str:
        return self.options.tenant

    @property
    def num_known(self) -> int:
        """Tokens that the host has."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def known_ids(self) -> Sequence[int]:
        """The tokens that the host has, prompt and output; not to be changed."""
        return [*self.prompt_ids, *self.output_ids] if self.output_ids else self.prompt_ids

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 where none is to be sampled any more."""
        last = self.max_total_tokens - (self.params.max_tokens != 0)  # the last one sampled is never computed
        return min(self.num_tokens, last) - self.num_computed

    @property
    def needs_token(self) -> bool:
        """Whether the next token cannot be sampled before the host has read the last: what is allowed depends on it."""
        return bool(self.params.bad_words) or self.params.structured_outputs is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens start … end - 1 of prompt and output together, touching no others."""
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + self.output_ids[max(0, start - split) : max(0, end - split)]
