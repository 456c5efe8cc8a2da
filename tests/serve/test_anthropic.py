"""The Messages API through the Anthropic client."""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from jaxinfer.serve.anthropic.schemas import MessagesRequest
from jaxinfer.serve.fields import Refused, notes
from tests.serve.waiting import is_idle, wait_until

MESSAGES = [{"role": "user", "content": "hello there"}]
ASKED = {"model": "tiny", "max_tokens": 20, "messages": MESSAGES, "extra_body": {"seed": 5}}
KEYS = {"secret-a": "ann", "secret-b": "bob"}


def same(message):
    """What two answers to one request have in common."""
    told = json.loads(message.to_json())
    del told["id"]
    for block in told["content"]:
        block.pop("parsed_output", None)
    usage = {name: count for name, count in told["usage"].items() if count is not None}
    usage["all"] = usage.pop("input_tokens") + usage.pop("cache_read_input_tokens")
    return {name: value for name, value in told.items() if value is not None and name != "usage"} | {"usage": usage}


def chat_tokens(engine, *messages):
    """The number of a conversation's tokens, given (role, content)."""
    return len(engine.tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages]))


def ending(engine, num_tokens=8):
    """Fields with which an answer ends by itself after so many tokens."""
    return {"min_tokens": num_tokens, "logit_bias": {str(engine.tokenizer.eos_token_id): 100}, "seed": 5}


def test_the_answer_is_that_of_a_chat_completion(served):
    message = served.anthropic().messages.create(**ASKED, system="be brief", metadata={"user_id": "ann"})
    chat = served.openai().chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "be brief"}, *MESSAGES], max_tokens=20, seed=5
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.choices[0].message.content
    assert message.id.startswith("msg_") and (message.type, message.role, message.model) == (
        "message",
        "assistant",
        "tiny",
    )
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (20, 0)


def test_a_stream_adds_up_to_the_whole_answer(served):
    client = served.anthropic()
    whole = client.messages.create(**ASKED)
    events = list(client.messages.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert len(kinds) > 6 and set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == whole.content[0].text
    assert events[0].message.usage.output_tokens >= 1 and events[0].message.stop_reason is None
    with client.messages.stream(**ASKED) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert same(final) == same(whole) and "".join(texts) == whole.content[0].text


def test_a_stream_has_the_events_of_the_api(served):
    text = served.post("/v1/messages", {"max_tokens": 2, "messages": MESSAGES, "stream": True}).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    kinds = [json.loads(line[6:])["type"] for line in text.splitlines() if line.startswith("data: ")]
    assert kinds == names


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended_is_told(served, engine, stream):
    client = served.anthropic()

    def ask(**changes):
        asked = {**ASKED, **changes}
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as made:
            return made.get_final_message()

    message = ask(extra_body=ending(engine))
    assert (message.stop_reason, message.stop_sequence, message.usage.output_tokens) == ("end_turn", None, 9)
    text = ask().content[0].text
    message = ask(stop_sequences=["never said", text[6:9]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[6:9])
    assert message.content[0].text == text[: text.index(text[6:9])]
    message = ask(max_tokens=1000, extra_body={"ignore_eos": True})
    assert message.stop_reason == "model_context_window_exceeded"
    message = ask(extra_body=ending(engine, num_tokens=0))
    assert (message.content, message.stop_reason) == ([], "end_turn")


def test_blocks_and_turns_become_messages(served, engine):
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "user", "content": [marked, {"type": "text", "text": "b", "citations": None}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    said = [("system", "be brief"), ("user", "a\nb\nc"), ("assistant", "d"), ("user", "e")]
    client = served.anthropic()
    usage = client.messages.create(**{**ASKED, "messages": messages}, system=system).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat_tokens(engine, *said)
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system)
    assert counted.input_tokens == chat_tokens(engine, *said)


def test_what_an_answer_says_can_be_sent_back(served, engine):
    client = served.anthropic()
    first = client.messages.create(**ASKED)
    messages = [*MESSAGES, first.to_param(), {"role": "user", "content": "more"}]
    second = client.messages.create(**{**ASKED, "messages": messages})
    said = [("user", "hello there"), ("assistant", first.content[0].text), ("user", "more")]
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == chat_tokens(engine, *said)


def test_a_last_message_of_the_assistant_is_gone_on_with(served):
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    message = served.anthropic().messages.create(**{**ASKED, "messages": messages})
    chat = {"messages": messages, "max_tokens": 20, "seed": 5}
    chat = served.post("/v1/chat/completions", {**chat, "continue_final_message": True}).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


class Fruit(BaseModel):
    name: Literal["apple", "pear"]


def test_answers_are_parsed_into_the_clients_models(served):
    message = served.anthropic().messages.parse(**{**ASKED, "max_tokens": 200}, output_format=Fruit)
    assert message.parsed_output.name in ("apple", "pear") and message.stop_reason == "end_turn"


def test_cached_tokens_are_not_input_tokens(served, engine):
    text = "a conversation that is long enough to fill some pages of the cache, and is not asked elsewhere"
    asked = {**ASKED, "messages": [{"role": "user", "content": text}]}
    first, second = (served.anthropic().messages.create(**asked).usage for _ in range(2))
    total = chat_tokens(engine, ("user", text))
    assert second.cache_read_input_tokens > first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total
    assert first.input_tokens + first.cache_read_input_tokens == total


def test_what_clients_send_at_values_that_ask_for_nothing_is_taken(served):
    message = served.anthropic().messages.create(
        **ASKED,
        thinking={"type": "disabled"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        tools=[],
        extra_headers={"anthropic-beta": "some-feature-2025-01-01"},
    )
    assert message.usage.output_tokens == 20


def test_the_beta_client_is_served_too(served):
    message = served.anthropic().beta.messages.create(**ASKED, betas=["some-feature-2025-01-01"])
    assert message.content[0].text == served.anthropic().messages.create(**ASKED).content[0].text


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"messages": []}, "invalid_request_error", "messages: is empty"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "invalid_request_error", "messages[0].role: 'robot'"),
        ({"messages": [{"role": "user"}]}, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "invalid_request_error", "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            "messages[0].content[0].type: this model takes no images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "invalid_request_error",
            "messages[0].content: no tool_use 'x'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
                ]
            },
            "invalid_request_error",
            "messages[0].content[0].cache_control",
        ),
        ({"system": [{"type": "text"}]}, "invalid_request_error", "system[0]"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens: should be greater than or equal to 1"),
        ({"max_tokens": ...}, "invalid_request_error", "max_tokens is missing"),
        ({"stop_sequences": [""]}, "invalid_request_error", "stop_sequences[0]"),
        ({"temperature": 200}, "invalid_request_error", "temperature=200"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "invalid_request_error", "thinking.type"),
        ({"output_config": {"effort": "low"}}, "invalid_request_error", "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "invalid_request_error",
            "output_config.format: ",
        ),
        ({"n": 2}, "invalid_request_error", "n: no such field"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "invalid_request_error", "context is 256"),
        ({"model": "other"}, "not_found_error", "other"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, change, kind, words):
    body = {
        name: value for name, value in {"max_tokens": 5, "messages": MESSAGES, **change}.items() if value is not ...
    }
    answer = served.post("/v1/messages", body)
    told = answer.json()
    assert answer.status_code == (404 if kind == "not_found_error" else 400)
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error", told
    assert told["error"]["type"] == kind and words in told["error"]["message"], told
    assert told["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize("field", [name for name, note in notes(MessagesRequest).items() if isinstance(note, Refused)])
def test_what_this_server_does_not_have_is_refused(served, field):
    with pytest.raises(anthropic.BadRequestError, match=f"{field}: "):
        served.anthropic().messages.create(**{**ASKED, "extra_body": {field: {"type": "x"}}})


def test_errors_are_the_clients_classes(serving, served):
    client = served.anthropic()
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASKED, "model": "other"})
    assert (
        caught.value.request_id == caught.value.response.headers["x-request-id"]
        and caught.value.type == "not_found_error"
    )
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="tiny", messages=[])
    assert served.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert served.post("/v1/messages/other").json()["error"]["type"] == "not_found_error"
    with serving(api_keys=KEYS, max_body_bytes=1000, max_requests_per_tenant=1) as found:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            found.anthropic("wrong").messages.create(**ASKED)
        assert caught.value.type == "authentication_error"
        ann, bob = (found.anthropic(key) for key in KEYS)
        with pytest.raises(anthropic.RequestTooLargeError) as caught:
            ann.messages.create(**ASKED, system="x" * 1000)
        assert str(caught.value.api_message).startswith("the body is larger")
        long = {**ASKED, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
        with ann.messages.stream(**long) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError) as caught:
                ann.messages.create(**ASKED)
            assert caught.value.type == "rate_limit_error" and int(caught.value.response.headers["retry-after"]) >= 1
            assert bob.messages.create(**ASKED).usage.output_tokens == 20


def test_a_timeout_is_an_error(served):
    asked = {**ASKED, "max_tokens": 200, "extra_body": {"timeout_s": 0.02, "ignore_eos": True}}
    with pytest.raises(anthropic.APIStatusError) as caught:
        served.anthropic().messages.create(**asked)
    assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")
    with pytest.raises(anthropic.APIStatusError) as caught, served.anthropic().messages.stream(**asked) as stream:
        stream.until_done()
    assert caught.value.type == "timeout_error"


def test_a_stream_that_cannot_go_on_ends_with_the_error(served, monkeypatch):
    def failing(output):
        raise RuntimeError("a secret")

    monkeypatch.setattr("jaxinfer.serve.server.checked", failing)
    with pytest.raises(anthropic.APIStatusError, match="internal error") as caught:
        list(served.anthropic().messages.create(**ASKED, stream=True))
    assert caught.value.type == "api_error"
    with pytest.raises(anthropic.InternalServerError, match="internal error"):
        served.anthropic().messages.create(**ASKED)


def test_a_client_that_goes_frees_what_it_had(served, engine):
    asked = {**ASKED, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with served.anthropic().messages.stream(**asked) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
        assert engine.stats()["pages_used"] > 0
    wait_until(partial(is_idle, engine))
