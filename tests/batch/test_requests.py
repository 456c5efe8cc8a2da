"""Records as the engine takes them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch.config import JobConfig
from jaxinfer.batch.fields import ARRAYS
from jaxinfer.batch.records import InputRecord
from jaxinfer.batch.requests import LongPromptError, RecordError, Requests, derived_seed
from jaxinfer.request import SamplingParams
from jaxinfer.structured.params import StructuredOutputsParams
from jaxinfer.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama"
TOKENIZER = load_tokenizer(FOLDER)
RESERVED = frozenset(("text", "source_file"))
CHAT = [{"role": "user", "content": "hi"}]
REGEX = StructuredOutputsParams(regex="a+")
# Of each field: a value as JSON has it, the same in an Example, and what SamplingParams holds then.
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "n": (2, [2], 2),
    "best_of": (3, [3], 3),
    "temperature": (0.5, [0.5], 0.5),
    "top_k": (4, [4], 4),
    "top_p": (0.5, [0.5], 0.5),
    "min_p": (0.25, [0.25], 0.25),
    "typical_p": (0.5, [0.5], 0.5),
    "repetition_penalty": (2, [2], 2.0),
    "presence_penalty": (-0.5, [-0.5], -0.5),
    "frequency_penalty": (0.5, [0.5], 0.5),
    "logit_bias": ({"3": -1.5}, [b'{"3": -1.5}'], {3: -1.5}),
    "allowed_token_ids": ([3, 4], [3, 4], [3, 4]),
    "bad_words": (["a", "b"], [b"a", b"b"], ["a", "b"]),
    "logits_processors": ({"p": {"x": 2}}, [b'{"p": {"x": 2}}'], {"p": {"x": 2.0}}),
    "seed": (2**64 - 1, [7], None),
    "max_tokens": (7, [7], 7),
    "min_tokens": (1, [1], 1),
    "stop": (["x", "y"], [b"x", b"y"], ["x", "y"]),
    "stop_token_ids": ([5], [5], [5]),
    "ignore_eos": (True, [1], True),
    "include_stop_str_in_output": (True, [1], True),
    "skip_special_tokens": (False, [0], False),
    "logprobs": (0, [0], 0),
    "prompt_logprobs": (1, [1], 1),
    "structured_outputs": ({"regex": "a+"}, [b'{"regex": "a+"}'], REGEX),
}


def requests(defaults=None, max_model_len=64, **config):
    return Requests(JobConfig(("in",), "out", **config), TOKENIZER, defaults or {}, max_model_len, 288, RESERVED)


def make(given, defaults=None, max_model_len=64, file="dir/a.tfrecord", index=3, **config):
    return requests(defaults, max_model_len, **config).make(file, InputRecord(index, 0, given))


def refusal(given, **settings):
    with pytest.raises(RecordError) as caught:
        make(given, **settings)
    return str(caught.value)


def line(body, url="/v1/chat/completions", **more):
    return {"custom_id": "one", "method": "POST", "url": url, "body": body, **more}


def test_a_prompt_is_text_tokens_or_messages():
    ids = TOKENIZER.encode("hi there")
    assert make({"prompt": "hi there"}).prompt_ids == ids
    assert make({"prompt": [b"hi there"]}).prompt_ids == ids
    assert make({"question": [b"hi there"], "prompt": "x"}, prompt_feature="question").prompt_ids == ids
    assert make({"prompt_token_ids": [1, 2]}).prompt_ids == [1, 2]
    chat = TOKENIZER.apply_chat_template(CHAT)
    for messages in (CHAT, json.dumps(CHAT), [json.dumps(CHAT).encode()]):
        assert make({"messages": messages}).prompt_ids == chat
    assert make({"messages": CHAT}, prompt_feature="messages").prompt_ids == chat
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert make({"messages": parts}).prompt_ids == chat
    own = make({"messages": CHAT}, chat_template="{{ messages[0]['content'] }}")
    assert own.prompt_ids == TOKENIZER.encode("hi", add_special_tokens=False)
    assert make({"prompt": "hi there", "messages": None, "prompt_token_ids": []}).prompt_ids == ids


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "x"}, "no prompt: prompt, prompt_token_ids, messages are missing; its fields are text"),
        ({}, "its fields are none"),
        ({"prompt": "a", "messages": CHAT}, "several prompts: prompt and messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [b"\xff"]}, "prompt: it is no UTF-8 at byte 0"),
        ({"prompt": "\ud800"}, "prompt: text has a lone surrogate"),
        ({"prompt": [b"a", b"b"]}, "prompt has 2 values"),
        ({"prompt": 5}, "prompt=5 must be text"),
        ({"prompt": [1, 2]}, "prompt has 2 values"),
        ({"prompt_token_ids": [288]}, "token id 288"),
        ({"prompt_token_ids": [-1]}, "token id -1"),
        ({"prompt_token_ids": [1.5]}, "token id 1.5"),
        ({"prompt_token_ids": "12"}, "must be a list"),
        ({"messages": "[{"}, "messages: it is no JSON"),
        ({"messages": [b"[]"]}, "messages: is empty"),
        ({"messages": {"role": "user"}}, "must be a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes no images"),
        ({"messages": [*CHAT, {"role": "tool", "tool_call_id": "1", "content": "x"}]}, "calls of tools"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_field(given, words):
    assert words in refusal(given)


def test_every_sampling_field_has_a_value_here():
    assert {each.name for each in fields(SamplingParams)} == set(VALUES) | set(ARRAYS)


@pytest.mark.parametrize("name", VALUES)
def test_a_record_sets_any_sampling_field(name):
    of_json, of_example, expected = VALUES[name]
    # A job's own value gives way, and so does the model's.
    other = {"temperature": 9.0, "max_tokens": 9, "top_k": 9}.get(name)
    sampling = {} if other is None else {name: other}
    for value in (of_json, of_example):
        params = make({"prompt": "hi", name: value}, defaults=sampling, sampling=sampling).params
        assert getattr(params, name) == (expected if name != "seed" else value if value == of_json else 7)
        assert getattr(params, name) != getattr(SamplingParams(), name), "it is not the default"
        left = {each.name for each in fields(SamplingParams)} - {name, "seed"}
        assert {each: getattr(params, each) for each in left} == {e: getattr(SamplingParams(), e) for e in left}
        assert make({"prompt": "hi", name: value}).features == {}


def test_other_ways_to_write_a_value():
    def of(**given):
        return make({"prompt": "hi", **given}).params

    assert of(stop="x").stop == "x" and of(stop=b"x").stop == "x"
    assert of(logits_processors=[b"p", b"q"]).logits_processors == {"p": {}, "q": {}}
    assert of(logits_processors=[b"p"]).logits_processors == {"p": {}}
    assert of(logits_processors='["p"]').logits_processors == {"p": {}}
    assert of(temperature=[], top_k=None, max_tokens=[]).temperature == 1.0
    assert of(guided_regex="a+").structured_outputs == REGEX
    assert of(guided_choice=[b"a", b"b"]).structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert of(response_format=[b'{"type": "json_object"}']).structured_outputs == StructuredOutputsParams(
        json_object=True
    )
    assert make({"prompt": "hi"}, sampling={"structured_outputs": {"regex": "a+"}}).params.structured_outputs == REGEX
    free = {"prompt": "hi", "response_format": {"type": "text"}}
    assert make(free, sampling={"structured_outputs": {"regex": "a+"}}).params.structured_outputs is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": [0.5, 0.6]}, "temperature has 2 values"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be a whole number"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens=2 exceeds max_tokens=1"),
        ({"ignore_eos": 2}, "ignore_eos=2 must be true or false"),
        ({"stop": [1]}, "stop=[1] must be a list of texts"),
        ({"stop": [b"\xff"]}, "stop: it is no UTF-8"),
        ({"bad_words": "x"}, "bad_words='x' must be a list"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids=[1.5]"),
        ({"logit_bias": "{"}, "logit_bias: it is no JSON"),
        ({"logit_bias": {"x": 1}}, "'x' is no token id"),
        ({"logit_bias": {"1": "x"}}, "must be a number"),
        ({"logits_processors": {"p": 1}}, "logits_processors['p']=1"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs: 'regx' is unknown"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one"),
        ({"guided_json": [1, 2]}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "[["}, "response_format: it is no JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "give one of them"),
        ({"seed": -1}, "seed=-1"),
        ({"return_logits": True}, "return_logits"),
    ],
)
def test_a_bad_field_is_refused_by_name(given, words):
    assert words in refusal({"prompt": "hi", **given})


def test_the_models_fields_give_way_to_the_jobs_and_those_to_the_records():
    defaults, sampling = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 5}, {"temperature": 0.5, "max_tokens": None}
    params = make({"prompt": "hi"}, defaults=defaults, sampling=sampling).params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, None)
    params = make({"prompt": "hi", "max_tokens": 3}, defaults=defaults, sampling=sampling).params
    assert (params.temperature, params.max_tokens) == (0.5, 3)
    with pytest.raises(ValueError, match="min_tokens=6 exceeds max_tokens=5"):
        requests({"max_tokens": 5}, sampling={"min_tokens": 6})


def test_seeds_are_of_the_job_the_file_and_the_place():
    seed = make({"prompt": "hi"}).params.seed
    # SHA-256 of b"0\0a.tfrecord\x003", its first eight bytes.
    assert seed == derived_seed(0, "a.tfrecord", 3) == 0x4FCF8290550C05AF
    assert make({"prompt": "other", "temperature": 0.5}, file="gs://b/elsewhere/a.tfrecord").params.seed == seed
    others = [make({"prompt": "hi"}, index=4), make({"prompt": "hi"}, file="b"), make({"prompt": "hi"}, seed=1)]
    assert len({seed, *(each.params.seed for each in others)}) == 4
    assert make({"prompt": "hi", "seed": [9]}, seed=1).params.seed == 9


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, False)])
def test_a_prompt_leaves_room_for_a_token(length, fits):
    given = {"prompt_token_ids": [1] * length}
    if fits:
        assert len(make(given).prompt_ids) == length
        return
    for policy in ("fail", "skip"):
        with pytest.raises(LongPromptError, match="64 tokens.*max_model_len=64 it may have 63"):
            make(given, on_long_prompt=policy)
    assert len(make({**given, "max_tokens": 0, "prompt_logprobs": 0}).prompt_ids) == 64, "it is only read"


def test_too_long_prompts_are_cut():
    ids = [*range(1, 101)]
    given = {"prompt_token_ids": ids, "max_tokens": 4}
    assert make(given, on_long_prompt="truncate-left").prompt_ids == ids[-60:]
    assert make(given, on_long_prompt="truncate-right").prompt_ids == ids[:60]
    assert make({**given, "max_tokens": 200}, on_long_prompt="truncate-left").prompt_ids == ids[-1:]
    whole = {"prompt_token_ids": ids}
    unlimited = make(whole, on_long_prompt="truncate-left", sampling={"max_tokens": None})
    assert unlimited.prompt_ids == ids[-63:]
    fitting = {"prompt_token_ids": ids[:63], "max_tokens": 30}
    assert make(fitting, on_long_prompt="truncate-left").prompt_ids == ids[:63], "it has room for one token"


def test_fields_that_mean_nothing_else_are_copied():
    given = {"prompt": "hi", "id": [b"7"], "score": [0.5], "temperature": 0.5, "guided_regex": "a"}
    assert make(given).features == {"id": [b"7"], "score": [0.5]}
    assert make(given, pass_through=("id", "prompt", "missing")).features == {"id": [b"7"], "prompt": "hi"}
    assert make({**given, "text": "x"}, pass_through=("id",)).features == {"id": [b"7"]}
    assert "'text' is a field of the results too" in refusal({**given, "text": "x"})
    with pytest.raises(ValueError, match="'text' is a field of the results"):
        requests(pass_through=("text",))


def test_a_line_of_openais_batches():
    ask = make(line({"model": "m", "messages": CHAT, "temperature": 0.5, "stream": False}), model_names=("m",))
    assert ask.prompt_ids == TOKENIZER.apply_chat_template(CHAT)
    assert ask.params.temperature == 0.5 and ask.params.max_tokens is None and ask.features == {"custom_id": "one"}
    ask = make(line({"prompt": "hi"}, "/v1/completions"), pass_through=("url",))
    assert ask.prompt_ids == TOKENIZER.encode("hi") and ask.params.max_tokens == 16
    assert ask.features == {"custom_id": "one", "url": "/v1/completions"}
    bare = line({"prompt": ["hi"], "add_special_tokens": False}, "/v1/completions")
    assert make(bare).prompt_ids == TOKENIZER.encode("hi", add_special_tokens=False)
    assert make(line({"prompt": [1, 2]}, "/v1/completions")).prompt_ids == [1, 2]
    # An article's body is no request's.
    assert make({"custom_id": "a", "body": "text", "prompt": "hi"}).features == {"custom_id": "a", "body": "text"}


BODIES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5},
    {"logit_bias": {"3": 1}, "stop": "x", "n": 2, "seed": 3},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    {"response_format": {"type": "text"}},
    {"guided_json": {"type": "object"}},
    {"guided_choice": ["a", "b"]},
    {"structured_outputs": {"regex": "a+", "grammar": None}},
    {"temperature": None, "top_p": 0.5, "allowed_token_ids": [1], "ignore_eos": True, "metadata": {"a": "b"}},
    {"logits_processors": ["p"], "bad_words": ["a"], "prompt_logprobs": 1, "skip_special_tokens": False},
]
OF_CHAT: list[dict[str, Any]] = [
    {"max_completion_tokens": 5, "max_tokens": 9},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": False},
]


@pytest.mark.parametrize("defaults", [{}, {"temperature": 0.6, "max_tokens": 40}])
@pytest.mark.parametrize("body", [*BODIES, *OF_CHAT, {"logprobs": 2}, {"best_of": 3}], ids=str)
def test_bodies_mean_what_they_mean_to_the_server(body, defaults):
    from jaxinfer.serve import params as of_server
    from jaxinfer.serve.schemas import ChatRequest, CompletionRequest
    from jaxinfer.serve.server import Server

    server: Any = Server.__new__(Server)  # all that is read of it here is the model's fields
    server.llm = SimpleNamespace(default_sampling_fields=defaults)
    if body not in OF_CHAT:
        expected = of_server.of_completion(server, CompletionRequest.model_validate({"prompt": "hi", **body}))
        found = make(line({"prompt": "hi", **body}, "/v1/completions"), defaults=defaults)
        assert {**vars(found.params), "seed": None} == {**vars(expected), "seed": None}
    if body not in ({"logprobs": 2}, {"best_of": 3}):
        expected = of_server.of_chat(server, ChatRequest.model_validate({"messages": CHAT, **body}))
        found = make(line({"messages": CHAT, **body}), defaults=defaults)
        assert {**vars(found.params), "seed": None} == {**vars(expected), "seed": None}


def test_lines_stand_over_the_jobs_fields():
    sampling = {"max_tokens": 9, "logprobs": 2, "structured_outputs": {"regex": "a+"}}
    params = make(line({"messages": CHAT}), sampling=sampling).params
    assert (params.max_tokens, params.logprobs, params.structured_outputs) == (9, 2, REGEX)
    body = {"messages": CHAT, "max_completion_tokens": 3, "logprobs": False, "response_format": {"type": "text"}}
    params = make(line(body), sampling=sampling).params
    assert (params.max_tokens, params.logprobs, params.structured_outputs) == (3, None, None)


def test_a_chat_line_tells_the_template():
    chat = [*CHAT, {"role": "assistant", "content": "he"}]
    continued = TOKENIZER.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert make(line({"messages": chat, "continue_final_message": True})).prompt_ids == continued
    without = TOKENIZER.apply_chat_template(CHAT, add_generation_prompt=False)
    assert make(line({"messages": CHAT, "add_generation_prompt": False})).prompt_ids == without
    template = "{{ messages[0]['content'] }}{{ tone }}"
    told = make(line({"messages": CHAT, "chat_template_kwargs": {"tone": "!"}}), chat_template=template)
    assert told.prompt_ids == TOKENIZER.encode("hi!", add_special_tokens=False)
    assert "reads no such variable" in refusal(line({"messages": CHAT, "chat_template_kwargs": {"tone": 1}}))
    assert "tools cannot be set" in refusal(line({"messages": CHAT, "chat_template_kwargs": {"tools": 1}}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"custom_id": "a", "body": {}}, "method is missing"),
        (line("text"), "body must be an object"),
        (line({}, custom_id=""), "custom_id must have"),
        (line({}, "/v1/embeddings"), "url='/v1/embeddings'"),
        (line({}, extra=1), "extra is no field"),
        (line({"messages": CHAT, "model": "gpt"}), "--served-model-name"),
        (line({"messages": CHAT, "model": ["m"]}), "body.model"),
        (line({"messages": CHAT, "stream": True}), "body.stream"),
        (line({"messages": CHAT, "tools": [{}]}), "body.tools"),
        (line({"messages": CHAT, "user": "ann"}), "body.user"),
        (line({"messages": CHAT, "temprature": 1}), "body.temprature"),
        (line({"messages": CHAT, "prompt": "x"}), "body.prompt"),
        (line({"messages": CHAT, "return_logits": True}), "body.return_logits"),
        (line({"messages": CHAT, "logprobs": 3}), "body.logprobs=3"),
        (line({"messages": CHAT, "top_logprobs": 3}), "needs logprobs"),
        (line({"messages": CHAT, "logprobs": True, "top_logprobs": 99}), "top_logprobs=99"),
        (line({"messages": CHAT, "max_tokens": 0}), "body.max_tokens=0"),
        (line({"messages": CHAT, "add_generation_prompt": 1}), "add_generation_prompt=1"),
        (line({"messages": CHAT, "chat_template_kwargs": 1}), "chat_template_kwargs=1"),
        (line({}), "must be a list of messages"),
        (line({}, "/v1/completions"), "body.prompt=None"),
        (line({"prompt": ["a", "b"]}, "/v1/completions"), "2 prompts"),
        (line({"prompt": "a", "echo": True}, "/v1/completions"), "body.echo"),
        (line({"prompt": "a", "add_special_tokens": 1}, "/v1/completions"), "add_special_tokens=1"),
        (line({"prompt": "a", "logprobs": True}, "/v1/completions"), "logprobs=True"),
    ],
)
def test_a_bad_line_is_refused_by_name(given, words):
    assert re.search(re.escape(words), refusal(given, model_names=("m",)))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
JSONS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
NAMES = st.sampled_from(
    [
        *VALUES,
        *ARRAYS,
        "prompt",
        "messages",
        "prompt_token_ids",
        "response_format",
        "guided_json",
        "guided_choice",
        "id",
    ]
)
MADE = requests()


@settings(max_examples=150)
@given(st.dictionaries(NAMES, JSONS, max_size=4), st.booleans())
def test_any_record_is_run_or_refused(given, is_line):
    record = InputRecord(0, None, line(given) if is_line else {"prompt": "hi", **given})
    try:
        ask = MADE.make("f", record)
    except RecordError as error:
        assert str(error)
        return
    assert ask.prompt_ids and isinstance(ask.params, SamplingParams)
