"""Prompt sets: reproducible, of the lengths asked for; files of one's own are refused by line."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.serve.jsonl import read_jsonl
from jaxinfer.bench.serve.prompts import (
    Lengths,
    Turn,
    compose,
    multi_turn_sessions,
    random_sessions,
    shared_prefix_sessions,
)


@given(st.integers(1, 200), st.integers(1, 200), st.floats(0, 0.99), st.none() | st.integers(1, 100), st.integers(0, 9))
def test_random_prompts_have_the_lengths_asked_for(input_len, output_len, ratio, vocab_size, seed):
    lengths = Lengths(input_len, output_len, ratio, vocab_size)
    sessions = list(itertools.islice(random_sessions(lengths, seed), 5))
    assert sessions == list(itertools.islice(random_sessions(lengths, seed), 5))
    for (turn,) in sessions:
        length = len(turn.content.split()) if isinstance(turn.content, str) else len(turn.content)
        assert max(1, round(input_len * (1 - ratio))) <= length <= round(input_len * (1 + ratio))
        assert turn.max_tokens is not None
        assert max(1, round(output_len * (1 - ratio))) <= turn.max_tokens <= round(output_len * (1 + ratio))
        assert isinstance(turn.content, str) == (vocab_size is None)
        if vocab_size is not None:
            assert all(isinstance(id, int) and 0 <= id < vocab_size for id in turn.content)


def test_prompts_differ_from_each_other_and_by_seed():
    prompts = [turn.content for (turn,) in itertools.islice(random_sessions(Lengths(20, 4)), 50)]
    other = [turn.content for (turn,) in itertools.islice(random_sessions(Lengths(20, 4), 1), 50)]
    assert len({str(prompt)[:30] for prompt in [*prompts, *other]}) == 100


@pytest.mark.parametrize("vocab_size", [None, 50])
def test_a_prefix_is_shared(vocab_size):
    sessions = shared_prefix_sessions(Lengths(4, 2, 0, vocab_size), 30, 2)
    contents = [turn.content for (turn,) in itertools.islice(sessions, 6)]
    words = [content.split() if isinstance(content, str) else content for content in contents]
    assert all(len(each) == 34 for each in words)
    assert words[0][:30] == words[2][:30] == words[4][:30] != words[1][:30] == words[3][:30]
    assert len({tuple(each[30:]) for each in words}) == 6


def test_bodies():
    turn, ids, messages = Turn("hello", 3), Turn([1, 2], 3), Turn([{"role": "system", "content": "be brief"}], 3)
    assert compose("completions", turn, []) == {"prompt": "hello"}
    assert compose("completions", ids, []) == {"prompt": [1, 2]}
    assert compose("completions", turn, [(turn, "hi"), (turn, "oh")]) == {"prompt": "hello\nhi\nhello\noh\nhello"}
    assert compose("chat", turn, []) == {"messages": [{"role": "user", "content": "hello"}]}
    assert compose("chat", turn, [(messages, "ok")])["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "hello"},
    ]
    for endpoint, wrong in (("chat", ids), ("completions", messages)):
        with pytest.raises(ValueError, match="need --endpoint"):
            compose(endpoint, wrong, [])


@pytest.mark.parametrize(
    "fields", [{"input_len": 0}, {"output_len": 0}, {"vocab_size": 0}, {"range_ratio": 1.0}, {"range_ratio": -0.1}]
)
def test_lengths_without_sense(fields):
    with pytest.raises(ValueError, match="must be"):
        Lengths(**fields)


def test_conversations_without_sense():
    with pytest.raises(ValueError, match="turns=0"):
        next(multi_turn_sessions(Lengths(), 0))
    with pytest.raises(ValueError, match="cannot be token ids"):
        next(multi_turn_sessions(Lengths(vocab_size=9), 2))
    with pytest.raises(ValueError, match="1 or more"):
        next(shared_prefix_sessions(Lengths(), 0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must be an object"),
        ("{}", "must have either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "must have either prompt or messages"),
        ('{"prompt": ""}', "prompt must be"),
        ('{"prompt": []}', "prompt must be"),
        ('{"prompt": [1, -2]}', "prompt must be"),
        ('{"prompt": [true]}', "prompt must be"),
        ('{"prompt": null}', "prompt must be"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens=1.5"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens=True"),
        ('{"prompt": "a", "stream": false}', "stream is set by the load generator"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "messages need --endpoint chat"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        read_jsonl(str(file), "completions")
    assert str(caught.value).startswith(f"{file}, line 3: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"content": "a"}]}', "messages must be a list"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"prompt": [1]}', "token ids need --endpoint completions"),
    ],
)
def test_a_bad_chat_line_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=f"line 1: {message}"):
        read_jsonl(str(file), "chat")


def test_files_that_are_no_files(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no requests"):
        read_jsonl(str(file), "chat")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_jsonl(str(file), "chat")


def test_good_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 2, "n": 1}\n{"messages": [{"role": "user", "content": "b"}]}')
    first, second = read_jsonl(str(file), "chat", 9)
    assert first == (Turn("a", 2, {"n": 1}),)
    assert second == (Turn([{"role": "user", "content": "b"}], 9),)
