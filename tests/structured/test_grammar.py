"""Masks against brute force over the languages they stand for, and what must not take long, fill memory or crash."""

from __future__ import annotations

import itertools
import random
import re
import resource
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.structured.grammar import MAX_CACHED, GrammarCompiler
from jaxinfer.structured.params import StructuredOutputsParams
from jaxinfer.tokenizer import blank_tokenizer

from . import vocabulary as vocab

TOKENIZER = vocab.vocabulary()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
LONGEST = 6


def compile(compiler: GrammarCompiler = COMPILER, **fields):
    return compiler.compile(StructuredOutputsParams(**fields))


def patterns(length: int = LONGEST) -> st.SearchStrategy[tuple[str, int]]:
    """Regular expressions over a and b, and the length of the longest text each can match."""
    leaf = st.sampled_from([("a", 1), ("b", 1), ("[ab]", 1), ("ab", 2), ("a?", 1), ("(?:a|bb)", 2), ("b{0,2}", 2)])

    def join(pairs):
        return "".join(f"(?:{text})" for text, _ in pairs), sum(size for _, size in pairs)

    def either(pairs):
        return "|".join(f"(?:{text})" for text, _ in pairs), max(size for _, size in pairs)

    inner = st.recursive(
        leaf,
        lambda each: (
            st.lists(each, min_size=1, max_size=3).map(join)
            | st.lists(each, min_size=2, max_size=3).map(either)
            | each.map(lambda pair: (f"(?:{pair[0]}){{1,2}}", 2 * pair[1]))
        ),
        max_leaves=5,
    )
    return inner.filter(lambda pair: pair[1] <= length)


@given(patterns(), st.randoms(use_true_random=False))
def test_a_token_is_allowed_where_a_matching_text_goes_on_with_it(pattern, chance):
    every = ["".join(text) for size in range(LONGEST + 1) for text in itertools.product("ab", repeat=size)]
    language = [text.encode() for text in every if re.fullmatch(pattern[0], text)]
    prefixes = {text[:size] for text in language for size in range(1, len(text) + 1)}
    matcher, text = compile(regex=pattern[0]).matcher(), b""
    while not matcher.complete:
        allowed = set(vocab.allowed_ids(matcher.mask()))
        tokens = range(vocab.NUM_FIXED - 256, TOKENIZER.vocab_size)
        expected = {token for token in tokens if text + TOKENIZER.token_bytes(token) in prefixes}
        assert allowed - {vocab.END} == expected, (pattern, text)
        assert (vocab.END in allowed) == (text in language) == matcher.accepting
        if not expected:
            break
        token = chance.choice(sorted(expected))
        matcher.add(token)
        text += TOKENIZER.token_bytes(token)
    assert text in language and not any(other.startswith(text) and other != text for other in language)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_a_choice_is_one_of_them_whatever_it_is_spelled_with(choices, chance):
    text, ended = vocab.walk(compile(choice=choices), TOKENIZER, chance)
    assert ended and text.decode() in choices


@pytest.mark.parametrize(
    "grammar", ['start: "a" pair*\npair: "(" pair ")" | "b"\n', 'root ::= "a" pair*\npair ::= "(" pair ")" | "b"\n']
)
def test_both_spellings_of_a_grammar_are_read(grammar):
    for seed in range(10):
        text, ended = vocab.walk(compile(grammar=grammar), TOKENIZER, random.Random(seed), 60)
        assert not ended or re.fullmatch(r"a(\(*b\)*)*", text.decode()) and text.count(b"(") == text.count(b")")


def test_digits_are_those_of_ascii_and_anchors_say_nothing():
    grammar = compile(regex=r"^\d/$")
    allowed = vocab.allowed_ids(grammar.matcher().mask())
    assert sorted(TOKENIZER.token_bytes(token) for token in allowed) == [b"%d" % digit for digit in range(10)]


def test_special_tokens_stand_for_no_text_but_can_be_named():
    grammar = compile(regex=r"(?s).*")
    allowed = vocab.allowed_ids(grammar.matcher().mask())
    assert 0 not in allowed and 1 not in allowed and vocab.END in allowed
    named = compile(grammar='start: "a" <s> "b"\n').matcher()
    named.add(TOKENIZER.backend.token_to_id("a"))
    assert vocab.allowed_ids(named.mask()) == [1]


@pytest.mark.parametrize("model_size", [200, 271, 272, 300, 1000])
def test_a_model_may_know_fewer_or_more_tokens_than_its_tokenizer(model_size):
    compiler = GrammarCompiler(TOKENIZER, model_size)
    mask = compile(compiler, regex="(?s).*").matcher().mask()
    assert len(mask) == -(-model_size // 32)
    allowed = vocab.allowed_ids(mask)
    assert max(allowed) < min(model_size, TOKENIZER.vocab_size) and vocab.END in allowed


def test_without_an_end_of_text_only_the_form_ends(monkeypatch):
    tokenizer = vocab.vocabulary()
    monkeypatch.setattr(type(tokenizer), "eos_token_ids", property(lambda _: ()))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    matcher = compile(compiler, regex="b").matcher()
    a, b = (tokenizer.backend.token_to_id(piece) for piece in "ab")
    assert b in vocab.allowed_ids(matcher.mask()) and a not in vocab.allowed_ids(matcher.mask())
    matcher.add(b)
    assert matcher.complete and vocab.allowed_ids(matcher.mask()) == []


def test_a_model_without_a_tokenizer_is_told_so():
    with pytest.raises(ValueError, match="without a tokenizer"):
        compile(GrammarCompiler(blank_tokenizer(40), 40), regex="a")


def test_outputs_of_one_grammar_do_not_disturb_one_another():
    grammar = compile(regex="a{1,3}|b")
    one, other = grammar.matcher(), grammar.matcher()
    first = one.mask().copy()
    one.add(TOKENIZER.backend.token_to_id("a"))
    assert (other.mask() == first).all() and (grammar.matcher().mask() == first).all()
    assert not (one.mask() == first).all()
    assert (one.mask() == one.mask()).all()


def test_a_token_that_does_not_fit_is_an_error_that_stays():
    matcher = compile(regex="a+").matcher()
    matcher.add(TOKENIZER.backend.token_to_id("b"))
    assert matcher.error and not matcher.complete and not matcher.accepting and not matcher.mask().any()
    matcher.add(TOKENIZER.backend.token_to_id("a"))
    assert matcher.error and not matcher.mask().any()


def test_grammars_are_kept_and_not_too_many():
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    kept = compile(compiler, regex="a")
    assert compile(compiler, regex="a") is kept
    for count in range(MAX_CACHED):
        compile(compiler, choice=[f"{count}"])
    assert compile(compiler, regex="a") is not kept


def test_threads_may_compile_at_once():
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(compile(compiler, regex=f"a{{{len(threads) % 2},9}}")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(each) for each in found}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "regex: invalid regular expression: unclosed group"),
        ({"regex": "(?=a)b"}, "regex: invalid regular expression: look-around"),
        ({"regex": r"(a)\1"}, "regex: invalid regular expression: backreferences are not supported"),
        ({"regex": "a\\"}, "ends with a backslash"),
        ({"regex": r"\bfoo"}, "lookarounds not supported"),
        ({"regex": "[a&&b]"}, "regex: no text matches it"),
        ({"grammar": "start: gone"}, 'grammar: at 1(8): unknown name: "gone"'),
        ({"grammar": "hello"}, "grammar is neither Lark, which has a rule `start:`, nor GBNF"),
        ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "attribute 'temperature' of a rule"),
        ({"grammar": 'start: a "y"\n  a[stop="x"]: /.*/'}, "attribute 'stop' of a rule"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object"),
    ],
)
def test_what_is_wrong_is_said(fields, message):
    with pytest.raises(ValueError) as raised:
        compile(**fields)
    assert message in str(raised.value) and "no_forcing" not in str(raised.value)


def doubled(depth: int) -> str:
    return "".join(f"\nA{level}: A{level - 1} A{level - 1}" for level in range(1, depth)) + '\nA0: "a" | "b"'


MANY: dict = {f"q{count}": {} for count in range(70)}
HOSTILE = {
    "catastrophic": {"regex": "(a+)+(a|aa)+b"},
    "exponential automaton": {"regex": "(.*a.{40}){9}"},
    "repetition": {"regex": "a{1000000}"},
    "repetitions": {"regex": "(((x{0,100}){0,100}){0,100}){0,100}"},
    "unicode": {"regex": r"(\p{L}{1,1000}\w{1,1000}){1,100}"},
    "parentheses": {"regex": "(" * 8000 + ")" * 8000},
    "lark parentheses": {"grammar": "start: " + "(" * 60_000 + ")" * 60_000},
    "gbnf parentheses": {"grammar": "root ::= " + "(" * 60_000 + ")" * 60_000},
    "blank lines": {"grammar": "\n" * 100_000 + "x"},
    "long name": {"grammar": "a" * 100_000},
    "doubling terminals": {"grammar": f"start: A39{doubled(40)}"},
    "doubling rules": {"grammar": f"start: a39{doubled(40).lower()}"},
    "empty ambiguity": {"grammar": 'start: start start | "a" | ""'},
    "alternatives": {"grammar": "start: " + " | ".join(f'"{count}" "y"' for count in range(7000))},
    "itself": {"grammar": "start: start"},
    "endless": {"json": {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}},
    "circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "products": {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]}},
    "optional": {"json": {"properties": {f"p{count}": {"type": "string"} for count in range(1000)}}},
    "objects": {"json": {"properties": {f"p{count}": {"properties": MANY} for count in range(60)}}},
    "large and wrong": {"json": {"properties": {f"p{count}": {"minLength": 9 - count} for count in range(900)}}},
    "items": {"json": {"type": "array", "minItems": 10**9}},
    "length": {"json": {"type": "string", "minLength": 10**6, "pattern": "^(.*a.{30})$"}},
    "multiples": {"json": {"properties": {f"p{count}": {"multipleOf": 9973, "minimum": count} for count in range(99)}}},
    "enum": {"json": {"enum": [f"v{count}" for count in range(9000)]}},
    "choices": {"choice": [f"choice {count}" for count in range(9000)]},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_neither_hang_nor_fill_memory(name):
    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before_bytes, start_s = peak_bytes(), time.monotonic()
    try:
        matcher = compile(**HOSTILE[name]).matcher()
    except ValueError as error:
        assert len(str(error)) < 800
    else:
        chance, longest_s = random.Random(1), 0.0
        for _ in range(200):
            step_s = time.monotonic()
            allowed = [token for token in vocab.allowed_ids(matcher.mask()) if token != vocab.END]
            if not allowed:
                assert matcher.error or matcher.accepting
                break
            matcher.add(chance.choice(allowed))
            longest_s = max(longest_s, time.monotonic() - step_s)
        assert longest_s < 0.5
    assert time.monotonic() - start_s < 5
    assert peak_bytes() - before_bytes < 256 * 2**20
