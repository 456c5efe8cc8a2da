"""Forms of an output, compiled over a vocabulary, and what follows an output through one."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.request import SamplingParams
from jaxinfer.structured.params import StructuredOutputsParams
from jaxinfer.structured.schema import check_schema, explain, without_no_ops
from jaxinfer.structured.vocabulary import llguidance_tokenizer
from jaxinfer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 32  # a grammar grows as outputs follow it, up to some 40 MB
_MAX_WHITESPACE = 64
# Bounds on time and memory: fuel is spent at some 15 to 50 thousand a millisecond, a lexer state takes 1 to 2 kB.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 5_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Without this, where one text alone can follow, only its own tokenization is allowed, and not every token that goes on.
_HEADER = '\n%llguidance {"no_forcing": true}\n'
_MATCHES_NOTHING = "NoExtensionBias"
# Attributes of a rule that would act on sampling, or take back tokens.
_RULE_ATTRIBUTE = re.compile(r"[\w?!.-]+[ \t]*\[[^\]]*?\b(temperature|stop|max_tokens)[ \t]*=")
_LARK_START = re.compile(r"%llguidance\b|[?!]?start[ \t]*[\[:]")


class Matcher:
    """Follows one output. `complete` where nothing can follow any more; `error` says why a matcher has given up."""

    def __init__(self, matcher: llguidance.LLMatcher, first_mask: np.ndarray, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask: np.ndarray | None = first_mask
        self.complete = matcher.is_stopped()
        self.error = ""

    @property
    def accepting(self) -> bool:
        """Whether the output so far has the form."""
        return not self.error and self._matcher.is_accepting()

    def add(self, token: int) -> None:
        """Follow the output by one token, which is no end."""
        if self.error:
            return
        self._mask = None
        if not self._matcher.consume_token(token):
            self.error = _short(self._matcher.get_error()) or f"token {token} does not fit"
        self.complete = not self.error and self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The packed mask of the next token, uint32 [ceil(V / 32)], ends included; all 0 where there is an error."""
        if self._mask is None or self.error:
            self._mask, error = _compute_mask(self._matcher, self._vocab_size)
            self.error = self.error or error
        return self._mask


class Grammar:
    """A form compiled over a vocabulary; any number of outputs may follow it."""

    def __init__(self, matcher: llguidance.LLMatcher, first_mask: np.ndarray, vocab_size: int):
        self._matcher = matcher
        self._first_mask = first_mask
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._first_mask, self._vocab_size)


class GrammarCompiler:
    """Compiles forms over one vocabulary, in any thread. The trie over it is built by the first call.

    Keeps the last `MAX_CACHED` grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trie: llguidance.LLTokenizer | None = None
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, params: SamplingParams) -> Grammar | None:
        """What a request asks for, compiled as `compile` does; None where it asks for no form."""
        return None if params.structured_outputs is None else self.compile(params.structured_outputs)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of what is asked for.

        Raises:
            ValueError: a bad regular expression, schema or grammar, a keyword of a schema that cannot be honoured, with
                its path, one too large, or one that nothing matches.
        """
        with self._lock:
            found = self._cache.get(params)
            if found is None:
                found = self._cache[params] = self._compile(params)
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(params)
            return found

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        if self._trie is None:
            self._trie = llguidance_tokenizer(self._tokenizer, self._vocab_size)
        kind = params.kind
        schema = spaced_schema(params)
        matcher, error = self._start(_lark_of(params) if schema is None else _json_rule(schema))
        if error:
            if schema is not None and kind == "json":
                raise explain(schema, error, lambda each: self._start(_json_rule(each))[1])
            place = "" if kind == "grammar" else r"at \d+\(\d+\): "  # in what was made of the caller's text
            raise ValueError(f"structured_outputs.{kind}: {re.sub(place, '', error, count=1)}")
        mask, error = _compute_mask(matcher, self._vocab_size)
        if error:
            why = "no text matches it" if error.startswith(_MATCHES_NOTHING) else error
            raise ValueError(f"structured_outputs.{kind}: {why}")
        mask.flags.writeable = False
        return Grammar(matcher, mask, self._vocab_size)

    def _start(self, lark: str) -> tuple[llguidance.LLMatcher, str]:
        from llguidance import LLMatcher, LLParserLimits

        assert self._trie is not None
        grammar = LLMatcher.grammar_from_lark(lark + _HEADER)
        matcher = LLMatcher(self._trie, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        return matcher, _short(matcher.get_error())


def _compute_mask(matcher: llguidance.LLMatcher, vocab_size: int) -> tuple[np.ndarray, str]:
    words = -(-vocab_size // 32)
    mask = np.zeros(-(-(vocab_size + 1) // 32), np.uint32)  # the trie has one id more
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if not matcher.is_error():
        if vocab_size % 32:
            mask[words - 1] &= (1 << vocab_size % 32) - 1
        return mask[:words], ""
    return np.zeros(words, np.uint32), _short(matcher.get_error())


def _short(error: str) -> str:
    """What is wrong, of llguidance's message, without the grammar that it quotes, much of which is not the caller's."""
    error = error.split("\n   1 |")[0].removesuffix("\n<non-verbose/>")
    error = error.split("failed to compile JSON schema: ")[-1]
    if "regex parse error:" in error:
        error = "invalid regular expression: " + error.rpartition("\nerror: ")[2]
    if "Enable 'coerce_one_of'" in error:
        error = "its options cannot be shown to exclude one another; use anyOf"
    if error.startswith("panic: "):
        error = "the grammar library failed on it"
    return error.strip()[:500]


def spaced_schema(params: StructuredOutputsParams) -> dict[str, Any] | None:
    """The schema with how its parts are spaced, None where another form is asked for.

    Raises:
        ValueError: a keyword that cannot be honoured, or a schema that nothing matches.
    """
    if params.json is None and not params.json_object:
        return None
    schema: Any = {"type": "object"} if params.json is None else json.loads(str(params.json))
    check_schema(schema)
    if schema is False:
        raise ValueError("structured_outputs.json: False is a schema that nothing matches")
    schema = {} if schema is True else without_no_ops(schema)
    if params.disable_any_whitespace:
        return {"x-guidance": {"whitespace_flexible": False}, **schema}
    # Unbounded, a model that likes white space would write nothing else.
    pattern = params.whitespace_pattern or rf"[\x20\x0A\x0D\x09]{{1,{_MAX_WHITESPACE}}}"
    return {"x-guidance": {"whitespace_pattern": pattern}, **schema}


def _json_rule(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


def _lark_of(params: StructuredOutputsParams) -> str:
    if params.choice is not None:
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in params.choice)
    if params.regex is not None:
        return f"start: {_regex_rule(params.regex)}"
    return _grammar_text(str(params.grammar))


def _regex_rule(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("structured_outputs.regex ends with a backslash that escapes nothing")
    return f"/{regex_to_lark(regex, 'd')}/"


def _grammar_text(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lines = [line.lstrip() for line in text.splitlines()]
    if not any(_LARK_START.match(line) for line in lines):
        try:
            return gbnf_to_lark(text)
        except Exception as error:
            why = f"is neither Lark, which has a rule `start:`, nor GBNF: {str(error)[:300]}"
            raise ValueError(f"structured_outputs.grammar {why}") from None
    for line in lines:
        if found := _RULE_ATTRIBUTE.match(line):
            why = f"the attribute {found[1]!r} of a rule is not supported; remove it"
            raise ValueError(f"structured_outputs.grammar: {why}")
    return text
