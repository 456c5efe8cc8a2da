"""What the fields of `/v1/responses` and `/v1/messages` do, for the walk over the table of fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EOS = 2
CHAT = [{"role": "user", "content": "once upon a time"}]
BASES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "once upon a time", "max_output_tokens": 10, "seed": 1},
    MESSAGES: {"messages": CHAT, "max_tokens": 10, "seed": 1},
    COUNT: {"messages": CHAT},
}
Ask = Any  # the Endpoint of the walk
Check = Callable[[Ask], None]


def _more(ask: Ask, num_tokens: int) -> dict[str, int]:
    return {"max_output_tokens" if ask.path == RESPONSES else "max_tokens": num_tokens}


def _said(text: str, ask: Ask) -> dict[str, Any]:
    return {"input": text} if ask.path == RESPONSES else {"messages": [{"role": "user", "content": text}]}


def _text(ask: Ask, **changes: Any) -> str:
    answer = ask.answer(**changes)
    blocks = answer["output"][0]["content"] if ask.path == RESPONSES else answer["content"]
    return "".join(block["text"] for block in blocks)


def _num_output(ask: Ask, **changes: Any) -> int:
    return ask.answer(**changes)["usage"]["output_tokens"]


def _num_input(ask: Ask, **changes: Any) -> int:
    usage = ask.answer(**changes)
    usage = usage.get("usage", usage)
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def _num_cached(ask: Ask, **changes: Any) -> int:
    usage = ask.answer(**changes)["usage"]
    return usage["input_tokens_details"]["cached_tokens"] if ask.path == RESPONSES else usage["cache_read_input_tokens"]


def _model(ask: Ask) -> None:
    ask.answer(model="tiny-alias")
    assert ask.post(model="other").status_code == 404


def _stream(ask: Ask) -> None:
    response = ask.post(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream") and response.text.startswith("event: ")


def _greedy(**field: Any) -> Check:
    def check(ask: Ask) -> None:
        greedy = _text(ask, temperature=0)
        assert _text(ask, temperature=1.5) != greedy
        assert _text(ask, temperature=1.5, **field) == greedy

    return check


def _varies(**field: Any) -> Check:
    """Of few letters, more are used."""

    def check(ask: Ask) -> None:
        few = {"temperature": 0, "logit_bias": {str(token): 90 for token in range(70, 78)}}
        assert len(set(_text(ask, **few, **field))) > len(set(_text(ask, **few)))

    return check


def _temperature(ask: Ask) -> None:
    assert _text(ask, temperature=0, seed=1) == _text(ask, temperature=0, seed=2)
    assert _text(ask, temperature=2, seed=1) != _text(ask, temperature=2, seed=2)


def _seed(ask: Ask) -> None:
    assert _text(ask, seed=7) == _text(ask, seed=7) != _text(ask, seed=8)


def _logit_bias(ask: Ask) -> None:
    letter = ask.served.server.tokenizer.decode([75])
    assert _text(ask, logit_bias={"75": 100}, temperature=0) == letter * 10


def _num_tokens(name: str) -> Check:
    def check(ask: Ask) -> None:
        assert _num_output(ask, ignore_eos=True, **{name: 3}) == 3

    return check


def _min_tokens(ask: Ask) -> None:
    ends = {"logit_bias": {str(EOS): 100}, "temperature": 0}
    assert _num_output(ask, **ends) == 1 and _num_output(ask, **ends, min_tokens=5) == 6


def _ignore_eos(ask: Ask) -> None:
    ends = {"logit_bias": {str(EOS): 100}, "temperature": 0}
    assert _num_output(ask, **ends) == 1 and _num_output(ask, **ends, ignore_eos=True) == 10


def _stop(name: str) -> Check:
    def check(ask: Ask) -> None:
        text = _text(ask, **_more(ask, 30))
        assert _text(ask, **_more(ask, 30), **{name: [text[6:8]]}) == text[: text.index(text[6:8])]

    return check


def _priority(ask: Ask) -> None:
    assert ask.passed(priority=-3)["priority"] == -3
    assert ask.post(priority=2**40).status_code == 400


def _cache_salt(ask: Ask) -> None:
    said = _said("a text that fills more than a page of sixteen tokens in the cache of keys and values", ask)
    salt = {"cache_salt": f"mine-{ask.path}"}
    _num_cached(ask, **said)
    assert _num_cached(ask, **said) > 0 == _num_cached(ask, **said, **salt) < _num_cached(ask, **said, **salt)


def _timeout(ask: Ask) -> None:
    response = ask.post(timeout_s=1e-6, ignore_eos=True, **_more(ask, 200))
    if ask.path == RESPONSES:
        assert (response.status_code, response.json()["status"]) == (200, "failed")
    else:
        assert response.status_code == 504


def _system(name: str) -> Check:
    def check(ask: Ask) -> None:
        assert _num_input(ask, **{name: "be brief"}) > _num_input(ask) + len("be brief") // 2

    return check


def _messages(ask: Ask) -> None:
    assert _num_input(ask, messages=[{"role": "user", "content": "more " * 20}]) > _num_input(ask) + 20
    assert ask.post(messages=[]).status_code == 400


EXTENSIONS: dict[str, Check] = {
    "model": _model,
    "stream": _stream,
    "temperature": _temperature,
    "top_p": _greedy(top_p=1e-6),
    "top_k": _greedy(top_k=1),
    "min_p": _greedy(min_p=1),
    "seed": _seed,
    "presence_penalty": _varies(presence_penalty=2),
    "frequency_penalty": _varies(frequency_penalty=2),
    "repetition_penalty": _varies(repetition_penalty=50),
    "logit_bias": _logit_bias,
    "min_tokens": _min_tokens,
    "ignore_eos": _ignore_eos,
    "priority": _priority,
    "cache_salt": _cache_salt,
    "timeout_s": _timeout,
}


def _input(ask: Ask) -> None:
    assert _num_input(ask, input=CHAT) == _num_input(ask) < _num_input(ask, input=[*CHAT, *CHAT])


def _previous(ask: Ask) -> None:
    first = ask.answer()
    second = ask.answer(previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > 2 * first["usage"]["input_tokens"]


def _store(ask: Ask) -> None:
    for value, status in ((None, 200), (True, 200), (False, 404)):
        made = ask.answer(store=value)
        assert made["store"] is (value is not False)
        assert ask.served.get(f"{RESPONSES}/{made['id']}").status_code == status


def _include(ask: Ask) -> None:
    assert ask.answer()["output"][0]["content"][0]["logprobs"] == []
    told = ask.answer(include=["message.output_text.logprobs"])["output"][0]["content"][0]["logprobs"]
    assert len(told) == 10 and told[0]["top_logprobs"] == []


def _top_logprobs(ask: Ask) -> None:
    answer = ask.answer(include=["message.output_text.logprobs"], top_logprobs=3)
    assert [len(each["top_logprobs"]) for each in answer["output"][0]["content"][0]["logprobs"]] == [3] * 10
    assert ask.error(top_logprobs=3)["param"] == "top_logprobs"


def _truncation(ask: Ask) -> None:
    long = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "word"}] * 10
    assert ask.error(input=[*long, *CHAT])["code"] == "context_length_exceeded"
    assert ask.answer(input=[*long, *CHAT], truncation="auto")["truncation"] == "auto"


def _metadata(ask: Ask) -> None:
    assert ask.answer(metadata={"run": "7"})["metadata"] == {"run": "7"}


def tenant(ask: Ask) -> None:
    assert ask.passed(user="ann")["tenant"] == "ann" and ask.passed()["tenant"] == ""


def safety_identifier(ask: Ask) -> None:
    assert ask.passed(safety_identifier="ann")["tenant"] == "ann"
    assert ask.passed(safety_identifier="ann", user="bob")["tenant"] == "bob"


def _user_id(ask: Ask) -> None:
    assert ask.passed(metadata={"user_id": "ann"})["tenant"] == "ann"


def _form(name: str) -> Check:
    def check(ask: Ask) -> None:
        form = {"type": "json_schema", "schema": {"enum": ["apple", "pear"]}}
        form |= {"name": "fruit"} if ask.path == RESPONSES else {}
        assert json.loads(_text(ask, **{name: {"format": form}})) in ("apple", "pear")
        error = ask.error(**{name: {"format": {**form, "schema": {"not": {}}}}})
        assert error["param"].startswith(f"{name}.format") and "not" in error["message"]
        assert ask.post(**{name: {"format": {"type": "xml"}}}).status_code == 400

    return check


def _function(ask: Ask) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}}
    flat = {"type": "function", "name": "take", "parameters": schema}
    return flat if ask.path == RESPONSES else {"name": "take", "input_schema": schema}


def _use(ask: Ask, **changes: Any) -> Any:
    """What is said about tools, as the prompt's maker is told it. The tiny context is too short for the prompt."""
    dialect, seen = ask.served.server.dialect, []
    make = dialect.for_template
    dialect.for_template = lambda messages, use: make(messages, seen.append(use) or use)
    try:
        ask.post(tools=[_function(ask)], **changes)
    finally:
        del dialect.for_template
    return seen[0]


def _tools(ask: Ask) -> None:
    assert _use(ask).names == ("take",)
    told = ask.post(tools=[_function(ask)])
    if ask.path == COUNT:
        assert told.json()["input_tokens"] > _num_input(ask) + 100
    else:
        assert "context is 256" in told.json()["error"]["message"]
    assert "tools[0].type" in ask.error(tools=[{"type": "web_search"}])["message"]


def _tool_choice(ask: Ask) -> None:
    none, any_, named = ("none", "required", {"type": "function", "name": "take"})
    if ask.path != RESPONSES:
        none, any_, named = {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "take"}
    modes = [_use(ask, tool_choice=choice).mode for choice in (None, none, any_, named)]
    assert modes == ["auto", "none", "required", "named"]
    assert "tool_choice" in ask.error(tool_choice=any_)["message"]


def _parallel(ask: Ask) -> None:
    assert _use(ask).parallel and not _use(ask, parallel_tool_calls=False).parallel


EFFECTS: dict[str, dict[str, Check]] = {
    RESPONSES: {
        **EXTENSIONS,
        "input": _input,
        "instructions": _system("instructions"),
        "previous_response_id": _previous,
        "store": _store,
        "max_output_tokens": _num_tokens("max_output_tokens"),
        "stop": _stop("stop"),
        "include": _include,
        "top_logprobs": _top_logprobs,
        "truncation": _truncation,
        "text": _form("text"),
        "metadata": _metadata,
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": _parallel,
        "user": tenant,
        "safety_identifier": safety_identifier,
    },
    MESSAGES: {
        **EXTENSIONS,
        "messages": _messages,
        "system": _system("system"),
        "max_tokens": _num_tokens("max_tokens"),
        "stop_sequences": _stop("stop_sequences"),
        "metadata": _user_id,
        "tools": _tools,
        "tool_choice": _tool_choice,
        "output_config": _form("output_config"),
    },
    COUNT: {
        "model": _model,
        "messages": _messages,
        "system": _system("system"),
        "tools": _tools,
        "tool_choice": _tool_choice,
    },
}
ACCEPTED: dict[str, tuple[Any, Any]] = {
    "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
    "background": (False, True),
    "cache_control": ({"type": "ephemeral"}, {"type": "other"}),
    "thinking": ({"type": "disabled"}, {"type": "enabled"}),
    "output_config": ({"format": None}, {"effort": "low"}),
    "speed": ("standard", "fast"),
}
