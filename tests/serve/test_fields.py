"""The table of fields: each one of each endpoint has the effect that its note promises.

`EFFECTS` has a check for every field that is enforced, `ACCEPTED` the values at which others are taken. A field that
neither holds fails the walk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from jaxinfer.serve.bodies import BODIES
from jaxinfer.serve.fields import Accepted, Enforced, Refused, table
from tests.serve import effects, offline_effects
from tests.serve.accepted_values import ACCEPTED
from tests.serve.endpoint import BASES, CHAT, COMPLETIONS, Check, Endpoint

ONCE: dict[str, Any] = {"prompt": ..., "messages": [{"role": "user", "content": "once"}]}  # for what takes messages
EOS = 2


def _model(ask: Endpoint) -> None:
    ask.answer(model="tiny-alias")
    assert ask.error(model="other")["code"] == "model_not_found"


def _stream(ask: Endpoint) -> None:
    assert len(ask.events()) > 2
    assert ask.post(stream=True).headers["content-type"].startswith("text/event-stream")


def _stream_options(ask: Endpoint) -> None:
    assert all("usage" not in each for each in ask.events())
    *_, last = ask.events(stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == 10
    *_, before, last = ask.events(stream_options={"continuous_usage_stats": True})
    assert before["usage"]["completion_tokens"] <= last["usage"]["completion_tokens"] == 10


def _is_greedy(**field: Any) -> Check:
    def check(ask: Endpoint) -> None:
        greedy = ask.text(temperature=0)
        assert ask.text(temperature=1.5) != greedy
        assert ask.text(temperature=1.5, **field) == greedy

    return check


def _changes(**field: Any) -> Check:
    """The field changes what is drawn, all else equal."""

    def check(ask: Endpoint) -> None:
        same = {"max_tokens": 40, "ignore_eos": True}
        assert ask.ids(**same, **field) != ask.ids(**same) == ask.ids(**same)

    return check


def _temperature(ask: Endpoint) -> None:
    assert ask.text(temperature=0, seed=1) == ask.text(temperature=0, seed=2)
    assert ask.text(temperature=2, seed=1) != ask.text(temperature=2, seed=2)


def _seed(ask: Endpoint) -> None:
    assert ask.text(seed=7) == ask.text(seed=7) != ask.text(seed=8)


def _penalty(**field: Any) -> Check:
    def check(ask: Endpoint) -> None:
        few = {"temperature": 0, "allowed_token_ids": [70, 71, 72, 73], "max_tokens": 12}
        assert len(set(ask.ids(**few, **field))) > len(set(ask.ids(**few)))

    return check


def _repetition(ask: Endpoint) -> None:
    few = {"temperature": 0, "allowed_token_ids": list(range(200, 230)), "max_tokens": 12}
    assert len(set(ask.ids(**few, repetition_penalty=50))) == 12 > len(set(ask.ids(**few)))


def _n(ask: Endpoint) -> None:
    assert [choice["index"] for choice in ask.answer(n=3)["choices"]] == [0, 1, 2]


def _logit_bias(ask: Endpoint) -> None:
    assert ask.ids(logit_bias={"75": 100}, temperature=0) == [75] * 10


def _allowed(ask: Endpoint) -> None:
    assert set(ask.ids(allowed_token_ids=[80, 81])) <= {80, 81}


def _bad_words(ask: Endpoint) -> None:
    words = [letter for letter in ask.text(max_tokens=30) if letter.isascii() and letter.isalnum()]
    assert words, "the free text must have a letter to forbid"
    assert words[0] not in ask.text(max_tokens=30, bad_words=[words[0]])


def _processors(ask: Endpoint) -> None:
    assert ask.ids(logits_processors={"favour": {"token": 90, "amount": 1000}}) == [90] * 10
    assert "favour" in ask.error(logits_processors=["other"])["message"]


def _max_tokens(ask: Endpoint) -> None:
    assert len(ask.ids(max_tokens=3, ignore_eos=True)) == 3


def _min_tokens(ask: Endpoint) -> None:
    ends = {"logit_bias": {str(EOS): 100}, "temperature": 0}
    assert len(ask.ids(**ends)) == 1 and len(ask.ids(**ends, min_tokens=5)) == 6


def _ignore_eos(ask: Endpoint) -> None:
    assert ask.ids(logit_bias={str(EOS): 100}, temperature=0, ignore_eos=True) == [EOS] * 10


def _stop(ask: Endpoint) -> None:
    text = ask.text(max_tokens=30)
    assert ask.text(max_tokens=30, stop=text[6:8]) == text[: text.index(text[6:8])]


def _include_stop(ask: Endpoint) -> None:
    text = ask.text(max_tokens=30)
    stop = text[6:8]
    assert ask.text(max_tokens=30, stop=stop, include_stop_str_in_output=True).endswith(stop)


def _stop_ids(ask: Endpoint) -> None:
    choice = ask.choice(stop_token_ids=[75], logit_bias={"75": 100}, temperature=0)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 75)


def _skip_special(ask: Endpoint) -> None:
    special = {"logit_bias": {"1": 100}, "temperature": 0, "max_tokens": 2}
    assert ask.text(**special) == "" and "<" in ask.text(**special, skip_special_tokens=False)


def _prompt_logprobs(ask: Endpoint) -> None:
    answer = ask.answer(prompt_logprobs=2)
    found = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    assert len(found) == answer["usage"]["prompt_tokens"] and found[0] is None and len(found[1]) >= 2


def _truncate(ask: Endpoint) -> None:
    assert ask.answer(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    assert ask.error(truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"


def _return_ids(ask: Endpoint) -> None:
    answer = ask.answer(return_token_ids=True)
    prompt = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"] and len(answer["choices"][0]["token_ids"]) == 10


def _as_ids(ask: Endpoint) -> None:
    wants = {"logprobs": True, "top_logprobs": 1} if ask.path == CHAT else {"logprobs": 1}
    choice = ask.choice(return_tokens_as_token_ids=True, return_token_ids=True, **wants)
    names = choice["logprobs"].get("tokens") or [each["token"] for each in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]


def _priority(ask: Endpoint) -> None:
    assert ask.passed(priority=-3)["priority"] == -3
    assert ask.error(priority=2**40)["param"] == "priority"


def _cache_salt(ask: Endpoint) -> None:
    text = "a text that fills more than a page of sixteen tokens in the cache of keys and values"
    prompt = {"prompt": text} if ask.path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    cached = lambda **salt: ask.answer(**prompt, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
    cached()
    assert cached() > 0 and cached(cache_salt=f"mine-{ask.path}") == 0 and cached(cache_salt=f"mine-{ask.path}") > 0


def _timeout(ask: Endpoint) -> None:
    assert ask.choice(timeout_s=1e-6, max_tokens=200, ignore_eos=True)["finish_reason"] == "timeout"


def _form(matches: Callable[[str], object], **field: Any) -> Check:
    """The output has a form that free ones do not have."""

    def check(ask: Endpoint) -> None:
        assert matches(ask.text(**field, max_tokens=120, temperature=1))

    return check


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def _is_of_schema(text: str) -> bool:
    return json.loads(text) in ({"a": 1}, {"a": 2})


def _response_format(ask: Endpoint) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "mine", "schema": SCHEMA}}
    _form(_is_of_schema, response_format=form)(ask)
    assert ask.text(response_format={"type": "text"}) == ask.text()
    error = ask.error(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "set"}}})
    assert error["param"] == "response_format" and "type" in error["message"]
    assert ask.error(response_format={"type": "json_schema"})["param"] == "response_format"


def _guided_regex(ask: Endpoint) -> None:
    _form(partial(re.fullmatch, "[ab]{3}c"), guided_regex="[ab]{3}c")(ask)
    assert ask.error(guided_regex="(")["param"] == "guided_regex"
    assert ask.error(guided_regex="a", guided_choice=["a"])["param"] == "guided_choice"


GENERATION: dict[str, Check] = {
    "response_format": _response_format,
    "structured_outputs": _form(["no", "yes"].__contains__, structured_outputs={"choice": ["no", "yes"]}),
    "guided_json": _form(_is_of_schema, guided_json=SCHEMA),
    "guided_regex": _guided_regex,
    "guided_choice": _form(["left", "right"].__contains__, guided_choice=["left", "right"]),
    "guided_grammar": _form(partial(re.fullmatch, "(xy)+"), guided_grammar='start: "xy" start | "xy"'),
    "model": _model,
    "stream": _stream,
    "stream_options": _stream_options,
    "n": _n,
    "temperature": _temperature,
    "top_p": _is_greedy(top_p=1e-6),
    "top_k": _is_greedy(top_k=1),
    "min_p": _is_greedy(min_p=1),
    "typical_p": _changes(typical_p=0.05),
    "seed": _seed,
    "presence_penalty": _penalty(presence_penalty=2),
    "frequency_penalty": _penalty(frequency_penalty=2),
    "repetition_penalty": _repetition,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "bad_words": _bad_words,
    "logits_processors": _processors,
    "max_tokens": _max_tokens,
    "min_tokens": _min_tokens,
    "stop": _stop,
    "stop_token_ids": _stop_ids,
    "ignore_eos": _ignore_eos,
    "include_stop_str_in_output": _include_stop,
    "skip_special_tokens": _skip_special,
    "prompt_logprobs": _prompt_logprobs,
    "truncate_prompt_tokens": _truncate,
    "return_token_ids": _return_ids,
    "return_tokens_as_token_ids": _as_ids,
    "user": effects.tenant,
    "safety_identifier": effects.safety_identifier,
    "priority": _priority,
    "cache_salt": _cache_salt,
    "timeout_s": _timeout,
}


def _prompt(ask: Endpoint) -> None:
    assert ask.answer(prompt=[70, 71, 72])["usage"]["prompt_tokens"] == 3
    assert [choice["index"] for choice in ask.answer(prompt=["a", "b"], n=2)["choices"]] == [0, 1, 2, 3]


def _best_of(ask: Endpoint) -> None:
    choices = ask.answer(best_of=4, n=2, logprobs=0, temperature=1.5)["choices"]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert len(choices) == 2 and totals == sorted(totals, reverse=True)
    assert ask.text(best_of=4, temperature=1.5) != ask.text(temperature=1.5)


def _echo(ask: Endpoint) -> None:
    assert ask.text(echo=True) == "once upon a time" + ask.text()


def _completion_logprobs(ask: Endpoint) -> None:
    found = ask.choice(logprobs=2, return_tokens_as_token_ids=True)["logprobs"]
    assert [len(top) for top in found["top_logprobs"]] == [2] * 10


def _special_tokens(ask: Endpoint) -> None:
    tokenizer = ask.served.server.tokenizer
    for special in (True, False):
        expected = tokenizer.encode(BASES[ask.path]["prompt"], special)
        got = ask.answer(add_special_tokens=special)
        assert (got["usage"]["prompt_tokens"] if ask.path == COMPLETIONS else got["count"]) == len(expected)


def _messages(ask: Endpoint) -> None:
    more = {**ONCE, "messages": [*ONCE["messages"], {"role": "assistant", "content": "upon"}]}
    assert _num_prompt_tokens(ask, **ONCE) < _num_prompt_tokens(ask, **more)


def _num_prompt_tokens(ask: Endpoint, **changes: Any) -> int:
    found = ask.answer(**changes)
    return found["count"] if "count" in found else found["usage"]["prompt_tokens"]


def _max_completion_tokens(ask: Endpoint) -> None:
    assert len(ask.ids(max_completion_tokens=4, ignore_eos=True)) == 4


def _chat_logprobs(ask: Endpoint) -> None:
    assert ask.choice()["logprobs"] is None
    content = ask.choice(logprobs=True, top_logprobs=3)["logprobs"]["content"]
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 3 for each in content)


def _generation_prompt(ask: Endpoint) -> None:
    assert _num_prompt_tokens(ask, **ONCE, add_generation_prompt=False) < _num_prompt_tokens(ask, **ONCE)


def _continue(ask: Endpoint) -> None:
    messages = {"prompt": ..., "messages": [{"role": "assistant", "content": "once"}]}
    continued = _num_prompt_tokens(ask, **messages, continue_final_message=True)
    assert continued < _num_prompt_tokens(ask, **messages, add_generation_prompt=False)


def _template_variables(ask: Endpoint) -> None:
    assert "no_such" in ask.error(**ONCE, chat_template_kwargs={"no_such": 1})["message"]
    longer = _num_prompt_tokens(ask, **ONCE, chat_template_kwargs={"tone": "a long text of its own"})
    assert longer > _num_prompt_tokens(ask, **ONCE)


def _tokenized_prompt(ask: Endpoint) -> None:
    tokens = ask.answer(prompt="twice")["tokens"]
    assert ask.served.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("twice")


def _token_strings(ask: Endpoint) -> None:
    assert ask.answer()["token_strs"] is None
    assert "".join(ask.answer(return_token_strs=True, add_special_tokens=False)["token_strs"]) == "once"


def _tokens(ask: Endpoint) -> None:
    assert ask.answer()["prompt"] == ask.served.server.tokenizer.decode([70, 71, 72])
    assert ask.error(tokens=[10**9])["param"] == "tokens"


def _tools(ask: Endpoint) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"enum": ["x"]}}}}
    told = {"tools": [{"type": "function", "function": function}], **ONCE}
    if ask.path == CHAT:
        assert "context is 256" in ask.error(**told)["message"]
        room = {**told, "truncate_prompt_tokens": 20, "max_tokens": 140, "tool_choice": "required"}
        calls = lambda **how: len(ask.choice(**{**room, **how})["message"].get("tool_calls", []))  # noqa: E731
        # A call has fewer than 80 tokens.
        assert calls(tool_choice="none") < calls(parallel_tool_calls=False) == 1 < calls(min_tokens=80)
    else:
        assert ask.answer(**told)["count"] > 256


EFFECTS: dict[str, dict[str, Check]] = {
    COMPLETIONS: {
        **GENERATION,
        "prompt": _prompt,
        "best_of": _best_of,
        "echo": _echo,
        "logprobs": _completion_logprobs,
        "add_special_tokens": _special_tokens,
    },
    CHAT: {
        **GENERATION,
        "messages": _messages,
        **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), _tools),
        "max_completion_tokens": _max_completion_tokens,
        "logprobs": _chat_logprobs,
        "top_logprobs": _chat_logprobs,
        "add_generation_prompt": _generation_prompt,
        "continue_final_message": _continue,
        "chat_template_kwargs": _template_variables,
    },
    "/tokenize": {
        "model": _model,
        "prompt": _tokenized_prompt,
        "messages": _messages,
        "tools": _tools,
        "add_special_tokens": _special_tokens,
        "add_generation_prompt": _generation_prompt,
        "continue_final_message": _continue,
        "chat_template_kwargs": _template_variables,
        "return_token_strs": _token_strings,
    },
    "/detokenize": {"model": _model, "tokens": _tokens},
    **offline_effects.effects(_model, effects.tenant, _priority),
    **effects.EFFECTS,
}

ROWS = table(BODIES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.endpoint}:{row.field}")
def test_a_field_does_what_its_note_says(served, row):
    ask = Endpoint(served, row.endpoint)
    if row.field not in BASES[row.endpoint]:
        ask.answer(**{row.field: None})  # null is absent
    if isinstance(row.note, Enforced):
        assert row.note.where
        EFFECTS[row.endpoint][row.field](ask)
    elif isinstance(row.note, Accepted):
        taken, refused = ACCEPTED[row.field]
        assert ask.answer(**{row.field: taken}).keys() == ask.answer().keys()
        error = ask.error(**{row.field: refused})
        assert error["param"].startswith(row.field) and row.note.why in error["message"]
    else:
        assert isinstance(row.note, Refused)
        error = ask.error(**{row.field: {"any": "thing"}})
        assert error["param"].startswith(row.field) and row.note.refusal in error["message"]


def test_no_check_is_left_without_a_field():
    enforced = {(row.endpoint, row.field) for row in ROWS if isinstance(row.note, Enforced)}
    assert {(path, field) for path, checks in EFFECTS.items() for field in checks} == enforced
    assert set(ACCEPTED) == {row.field for row in ROWS if isinstance(row.note, Accepted)}


@pytest.mark.parametrize("path", BASES)
def test_unknown_fields_are_named_with_the_nearest_one(served, path):
    error = Endpoint(served, path).error(modell="x")
    assert error["param"].startswith("modell") and "model" in error["message"]
    assert error["code"] == "unknown_parameter" or path in (effects.MESSAGES, effects.COUNT)
