"""Tools and reasoning through the Responses and Messages APIs: what a model writes, scripted, as clients read it."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tests.serve.scripted import Scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "get_weather", "description": "The weather now", "parameters": SCHEMA}
TOOL = {"name": "get_weather", "description": "The weather now", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
SHORT = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}>"
TEXTS = [CALL, f"Let me look.\n{CALL}", f"{CALL}\n{CALL}", f"So: {CALL} and then", "No need.", CALL[:60]]


@pytest.fixture(scope="module")
def model(engine):
    return Scripted(engine)


@pytest.fixture(scope="module")
def found(runner, model):
    with runner(model) as found:
        yield found


@pytest.fixture(scope="module")
def thinking(runner, model):
    with runner(model, chat_template=THINKING) as found:
        yield found


def respond(found, **fields):
    return found.openai().responses.create(model="tiny", **{"input": "How is it?", "tools": [FUNCTION], **fields})


def ask(found, **fields):
    asked = {"max_tokens": 1000, "messages": [{"role": "user", "content": "How is it?"}], "tools": [TOOL], **fields}
    return found.anthropic().messages.create(model="tiny", **asked)


def items_of(response):
    """An answer's items, without what differs from one to the next."""
    return [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def test_calls_are_items(found, model):
    model.texts = [TEXTS[1]]
    response = respond(found)
    text, call = response.output
    assert (text.type, text.content[0].text, response.status) == ("message", "Let me look.", "completed")
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call",
        "get_weather",
        '{"city": "Bern"}',
        "completed",
    )
    assert response.tools[0].name == "get_weather" and response.tool_choice == "auto"
    assert '"name": "get_weather", "description": "The weather now"' in model.prompts[-1]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_items_adds_up_to_the_whole_answer(found, model, text):
    model.texts = [text]
    whole, events = respond(found), list(respond(found, stream=True))
    assert items_of(events[-1].response) == items_of(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    pieces = {}
    for event in events:
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
    assert list(pieces.values()) == [told for _, _, told in items_of(whole)]
    with found.openai().responses.stream(model="tiny", input="How is it?", tools=[FUNCTION]) as stream:
        assert items_of(stream.get_final_response()) == items_of(whole)


def test_a_round_trip_of_items(found, model):
    model.texts = [CALL]
    first = respond(found)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain in Bern"}
    model.texts = ["It rains."]
    second = respond(found, input=[output], previous_response_id=first.id)
    assert second.output_text == "It rains."
    by_id = model.prompts[-1]
    assert CALL in by_id and "<tool_response>\nrain in Bern\n</tool_response>" in by_id
    output["output"] = [{"type": "input_text", "text": "rain in Bern"}]
    respond(found, input=[{"role": "user", "content": "How is it?"}, *first.output, output])
    assert model.prompts[-1] == by_id
    kinds = [item.type for item in found.openai().responses.input_items.list(second.id, order="asc").data]
    assert kinds == ["message", "function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "declared twice"),
        ({"tools": [{**FUNCTION, "mood": 1}]}, "tools[0].mood", "no such field"),
        ({"tools": [{**FUNCTION, "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "object"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "not among"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tools are given"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "'x'"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]},
            "input[0].arguments",
            "JSON object",
        ),
        ({"input": [{"type": "function_call_output", "output": "y"}]}, "input[0].call_id", "text"),
        ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary", "empty"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "no such field"),
    ],
)
def test_what_responses_refuse(found, change, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        respond(found, **change)
    assert caught.value.param == param


def test_reasoning_is_an_item_of_its_own(thinking, model):
    model.texts = ["It may rain.</think>\n\nTake a coat."]
    whole = respond(thinking, tools=[])
    reasoning, message = whole.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "It may rain.", [])
    assert message.content[0].text == whole.output_text == "Take a coat."
    assert whole.usage.output_tokens_details.reasoning_tokens == len(model.tokenizer.encode("It may rain.", False))
    events = list(respond(thinking, tools=[], stream=True))
    assert items_of(events[-1].response) == items_of(whole)
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert len(thoughts) > 1 and "".join(thoughts) == "It may rain."
    model.texts = ["So.</think>Yes."]
    again = [{"role": "user", "content": "Sure?"}]
    assert respond(thinking, tools=[], input=again, previous_response_id=whole.id).output_text == "Yes."


def test_forced_calls_are_made(runner, engine):
    with runner(engine, chat_template=SHORT) as found:
        sizes = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
        response = found.openai().responses.create(
            model="tiny",
            input="a",
            tools=[{"type": "function", "name": "take", "parameters": sizes}],
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"seed": 1},
        )
        (call,) = response.output
        assert (call.name, json.loads(call.arguments)["size"]) in (("take", "small"), ("take", "large"))
        message = found.anthropic().messages.create(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "a"}],
            tools=[{"name": "take", "input_schema": sizes}],
            tool_choice={"type": "tool", "name": "take"},
            extra_body={"seed": 1},
        )
        (block,) = message.content
        assert (block.name, message.stop_reason) == ("take", "tool_use") and block.input["size"] in ("small", "large")


def blocks_of(message):
    told = [block.to_dict() for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "parsed_output")} for block in told]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_blocks_adds_up_to_the_whole_answer(found, model, text):
    model.texts = [text]
    whole = ask(found)
    asked = {"max_tokens": 1000, "messages": [{"role": "user", "content": "How is it?"}], "tools": [TOOL]}
    with found.anthropic().messages.stream(model="tiny", **asked) as stream:
        final = stream.get_final_message()
    assert blocks_of(final) == blocks_of(whole)
    assert final.stop_reason == whole.stop_reason == ("end_turn" if text == "No need." else "tool_use")


def test_calls_are_blocks_and_results_go_back(found, model):
    model.texts = [TEXTS[1]]
    first = ask(found)
    text, call = first.content
    assert (text.text, call.type, call.name, call.input) == (
        "Let me look.",
        "tool_use",
        "get_weather",
        {"city": "Bern"},
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "no answer"}]}
    user = {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "Well?"}]}
    messages = [{"role": "user", "content": "How is it?"}, first.to_param(), user]
    model.texts = ["I cannot say."]
    assert ask(found, messages=messages).content[0].text == "I cannot say."
    prompt = model.prompts[-1]
    assert CALL in prompt and "Error: no answer" in prompt and prompt.index("no answer") < prompt.index("Well?")


def test_a_call_that_was_cut_off_has_the_whole_values_that_had_come(found, model):
    model.texts, model.finish_reason = [CALL[:60]], "length"
    try:
        message, response = ask(found, max_tokens=1), respond(found)
    finally:
        model.finish_reason = "stop"
    assert (message.content[0].input, message.stop_reason) == ({}, "max_tokens")
    assert items_of(response) == [("function_call", "incomplete", '{"city": "B')]


def test_thinking_is_a_block_of_its_own(thinking, model):
    model.texts = ["It may rain.</think>\n\nTake a coat."]
    whole = ask(thinking, tools=[])
    thought, text = whole.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "It may rain.", "Take a coat.")
    asked = {"max_tokens": 1000, "messages": [{"role": "user", "content": "How is it?"}]}
    with thinking.anthropic().messages.stream(model="tiny", **asked) as stream:
        assert blocks_of(stream.get_final_message()) == blocks_of(whole)
    ask(thinking, tools=[], messages=[*asked["messages"], whole.to_param(), {"role": "user", "content": "Sure?"}])
    assert "Take a coat." in model.prompts[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools\\[0\\].type: 'web_search_20250305'",
        ),
        ({"tools": [TOOL, TOOL]}, "tools\\[1\\].name: .* declared twice"),
        ({"tools": [{"name": "f"}]}, "tools\\[0\\].input_schema"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools\\[0\\].input_schema.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: 'f' is not among"),
        ({"tool_choice": {"type": "some"}}, "tool_choice: .* any, none"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
            "name: None must be a text",
        ),
    ],
)
def test_what_messages_refuse(found, change, words):
    with pytest.raises(anthropic.BadRequestError, match=words):
        ask(found, **change)
