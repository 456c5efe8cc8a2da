"""Tools and reasoning over HTTP: what a model writes, scripted, as the OpenAI client reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.scripted import Scripted

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "How is it in Bern?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"

# Short enough for the tiny model's context.
SHORT = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}>"


def chooser(name: str, strict: bool = False, **schema: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        **schema,
    }
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


CHOOSERS = [chooser("take", True), chooser("drop", True)]


@pytest.fixture(scope="module")
def model(engine: Any) -> Scripted:
    return Scripted(engine)


@pytest.fixture(scope="module")
def client(runner: Any, model: Scripted) -> Iterator[openai.OpenAI]:
    with runner(model) as found:
        yield found.openai()


@pytest.fixture(scope="module")
def thinking_client(runner: Any, model: Scripted) -> Iterator[openai.OpenAI]:
    with runner(model, chat_template=THINKING) as found:
        yield found.openai()


def create(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASK, **fields})


def put_together(chunks: Any) -> dict[int, dict[str, Any]]:
    """The messages that a stream's deltas add up to, by the rules of the API."""
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message = messages.setdefault(
                choice.index, {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
            )
            assert message["finish_reason"] is None
            message["finish_reason"] = choice.finish_reason
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(message["tool_calls"]) and call.type == "function"
                    message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return messages


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_whole_answer_holds_the_calls(client: Any, model: Scripted, num_calls: int) -> None:
    model.texts = [f"Let me look.\n{CALL * num_calls}"]
    answer = create(client, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me look."
    calls = answer.message.tool_calls
    assert [(each.type, each.function.name, each.function.arguments) for each in calls] == [
        ("function", "get_weather", '{"city": "Bern"}')
    ] * num_calls
    assert len({each.id for each in calls}) == num_calls
    model.texts = [CALL]
    assert create(client, tools=[WEATHER]).choices[0].message.content is None


def test_a_stream_adds_up_to_the_whole_answer(client: Any, model: Scripted) -> None:
    model.texts = [f"So: {CALL}\n{CALL}", "No need.", f"{CALL} and"]
    whole = {choice.index: choice for choice in create(client, tools=[WEATHER], n=3).choices}
    chunks = list(create(client, tools=[WEATHER], n=3, stream=True))
    told = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert len(told) > 9, "arguments come in pieces"
    for index, message in put_together(chunks).items():
        expected = whole[index]
        assert message["finish_reason"] == expected.finish_reason == ("stop" if index == 1 else "tool_calls")
        assert message["content"] == (expected.message.content or "")
        assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [
            (call.function.name, call.function.arguments) for call in expected.message.tool_calls or []
        ]


def test_an_answer_that_was_cut_says_so(client: Any, model: Scripted) -> None:
    model.texts, model.finish_reason = [CALL[:60]], "length"
    try:
        choice = create(client, tools=[WEATHER]).choices[0]
        (message,) = put_together(create(client, tools=[WEATHER], stream=True)).values()
    finally:
        model.finish_reason = "stop"
    assert choice.finish_reason == message["finish_reason"] == "length"
    assert choice.message.tool_calls[0].function.arguments == message["tool_calls"][0]["arguments"] == '{"city": "B'


def test_a_round_trip_with_a_result(client: Any, model: Scripted) -> None:
    model.texts = [CALL]
    messages: list[Any] = list(ASK)
    answer = create(client, messages=messages, tools=[WEATHER]).choices[0].message
    assert '"name": "get_weather", "description": "The weather now"' in model.prompts[-1]
    messages.append(answer)
    for call in answer.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"})
    model.texts = ["It rains."]
    last = create(client, messages=messages, tools=[WEATHER]).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("It rains.", None, "stop")
    assert CALL in model.prompts[-1] and "<tool_response>\nrain in Bern\n</tool_response>" in model.prompts[-1]


def test_tools_that_may_not_be_called(client: Any, model: Scripted) -> None:
    model.texts = [CALL]
    for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {}):
        choice = create(client, **fields).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert "get_weather" not in model.prompts[-1]
    model.texts = [CALL.replace("get_weather", "rm")]
    assert create(client, tools=[WEATHER]).choices[0].message.content == model.texts[0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": []}, "tools", "1 to 128"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "declared twice"),
        ({"tool_choice": "auto"}, "tool_choice", "tools are given"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.function.name", "not among the tools"),
        ({"extra_body": {"parallel_tool_calls": 1}}, "parallel_tool_calls", "bool"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]", "takes no images"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    ],
)  # fmt: skip
def test_what_is_refused(client: Any, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **fields)
    assert caught.value.param == param and words in str(caught.value)


def test_reasoning_is_apart(thinking_client: Any, model: Scripted) -> None:
    model.texts = [f"\nI call.\n</think>\n\nOne moment. {CALL}", "</think>\n\nNo.", "hm"]
    whole = create(thinking_client, tools=[WEATHER], n=3).choices
    streamed = put_together(create(thinking_client, tools=[WEATHER], n=3, stream=True))
    for choice, reasoning, content in zip(whole, ["I call.", "", "hm"], ["One moment.", "No.", ""], strict=True):
        message = streamed[choice.index]
        assert getattr(choice.message, "reasoning_content", "") == message["reasoning"] == reasoning
        assert (choice.message.content or "") == message["content"] == content
    assert len(whole[0].message.tool_calls) == len(streamed[0]["tool_calls"]) == 1


def test_reasoning_stays_in_the_content_where_that_is_asked(runner: Any, model: Scripted) -> None:
    model.texts = ["<think>a</think>b"]
    with runner(model, reasoning_parser="none", chat_template=THINKING) as found:
        assert create(found.openai()).choices[0].message.content == "<think>a</think>b"
    with runner(model, reasoning_parser="deepseek_r1") as found:
        assert create(found.openai()).choices[0].message.reasoning_content == "a"


def test_the_format_can_be_named(runner: Any, model: Scripted) -> None:
    model.texts = ['{"name": "get_weather", "parameters": {"city": "Bern"}}']
    with runner(model, tool_call_parser="llama") as found:
        answer = create(found.openai(), tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert '{"name": "function_name", "parameters": {"argument": "value"}}' in model.prompts[-1]


def test_tokenize_counts_the_tools(runner: Any, model: Scripted) -> None:
    with runner(model) as found:
        body = {"messages": ASK, "return_token_strs": True}
        plain = found.post("/tokenize", body).json()
        told = found.post("/tokenize", {**body, "tools": [WEATHER]}).json()
    assert told["count"] > plain["count"] and "get_weather" in "".join(told["token_strs"])


@pytest.fixture(scope="module")
def forced(runner: Any, engine: Any) -> Iterator[openai.OpenAI]:
    """The tiny model itself, which makes no calls unless a grammar has it."""
    with runner(engine, chat_template=SHORT) as found:
        yield found.openai()


@pytest.mark.parametrize("parser", ["hermes", "llama"])
def test_calls_can_be_required(runner: Any, engine: Any, parser: str) -> None:
    with runner(engine, chat_template=SHORT, tool_call_parser=parser) as found:
        for seed in range(2):
            asked = {"tools": CHOOSERS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            whole = create(found.openai(), **asked).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content is None
            (call,) = whole.message.tool_calls
            assert call.function.name in ("take", "drop")
            assert json.loads(call.function.arguments) in ({"size": "small"}, {"size": "large"})
            (message,) = put_together(create(found.openai(), **asked, stream=True)).values()
            assert message["finish_reason"] == "tool_calls" and message["content"] == ""
            (streamed,) = message["tool_calls"]
            assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)


def test_a_function_can_be_named(forced: Any) -> None:
    named = {"type": "function", "function": {"name": "drop"}}
    for choice in create(forced, tools=CHOOSERS, tool_choice=named, n=3, seed=1).choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "drop" and json.loads(call.function.arguments)["size"] in ("small", "large")


def test_the_clients_own_stream_reads_strict_calls(forced: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": CHOOSERS, "tool_choice": "required", "seed": 3}
    with forced.chat.completions.stream(**asked, parallel_tool_calls=False) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.parsed_arguments["size"] in ("small", "large")


def test_the_model_may_still_answer_in_words(forced: Any) -> None:
    choice = create(forced, tools=CHOOSERS, max_tokens=30, seed=1).choices[0]
    assert choice.message.content and choice.message.tool_calls is None


def test_a_forced_round_trip(forced: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Take one."}]
    asked: dict[str, Any] = {"tools": CHOOSERS, "max_tokens": 60, "seed": 1}
    answer = create(forced, messages=messages, tool_choice="required", parallel_tool_calls=False, **asked)
    call = answer.choices[0].message.tool_calls[0]
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    last = create(forced, messages=messages, tool_choice="none", **asked).choices[0]
    assert last.message.content and last.message.tool_calls is None


@pytest.mark.parametrize(
    ("tool", "param", "words"),
    [
        (chooser("f", False, **{"not": {}}), "tools[0].function.parameters", "'not' at # is not supported"),
        (chooser("f", properties={"a": {"type": "string", "pattern": "("}}), "tools", "cannot be enforced"),
        (chooser("f", description="long " * 40_000), "tools", "cannot be enforced"),
    ],
)
def test_schemas_that_cannot_be_enforced(forced: Any, tool: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(forced, tools=[tool], tool_choice="required")
    assert caught.value.param == param and words in str(caught.value)


def test_content_may_have_a_schema_beside_calls(forced: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"enum": [True, False]}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked: dict[str, Any] = {"tools": CHOOSERS, "response_format": response_format, "max_tokens": 100}
    for choice in create(forced, n=4, seed=1, **asked).choices:
        calls = choice.message.tool_calls or []
        assert bool(calls) != bool(choice.message.content)
        assert not choice.message.content or json.loads(choice.message.content)["ok"] in (True, False)
    # One call at most: of several, max_tokens may cut the last, whose text is then content.
    forced_call = create(forced, tool_choice="required", parallel_tool_calls=False, **asked).choices[0].message
    assert forced_call.tool_calls and forced_call.content is None


def test_forms_that_leave_no_room_are_refused(forced: Any, thinking_client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="exclude each other") as caught:
        create(forced, tools=CHOOSERS, extra_body={"guided_regex": "a+"})
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="reasons first") as caught:
        create(thinking_client, extra_body={"guided_choice": ["a", "b"]})
    assert caught.value.param == "guided_choice"


def test_special_tokens_stay_in_the_text_where_calls_are_made_of_them(
    runner: Any, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner(model) as found:
        create(found.openai(), tools=[WEATHER])
        assert model.params.skip_special_tokens
        monkeypatch.setattr(found.server.dialect, "has_special_marks", lambda use: bool(use.names))
        create(found.openai(), tools=[WEATHER])
        assert not model.params.skip_special_tokens
        create(found.openai(), tools=[WEATHER], extra_body={"skip_special_tokens": True})
        assert model.params.skip_special_tokens
