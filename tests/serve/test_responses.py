"""The Responses API through the OpenAI client."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Literal

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from jaxinfer.serve.fields import Refused, notes
from jaxinfer.serve.responses.schemas import ResponsesRequest
from jaxinfer.serve.responses.store import ResponseStore, StoredResponse
from tests.serve.waiting import is_idle, wait_until

ASKED = {"model": "tiny", "input": "hello there", "max_output_tokens": 20, "extra_body": {"seed": 5}}
LOGPROBS = "message.output_text.logprobs"
KEYS = {"secret-a": "ann", "secret-b": "bob"}


def same(response):
    """What two answers to one request have in common."""
    told = json.loads(response.to_json())
    for name in ("id", "created_at", "completed_at", "usage"):
        del told[name]
    for item in told["output"]:
        del item["id"]
        for part in item["content"]:
            part.pop("parsed", None)
    return told


def test_the_answer_is_that_of_a_chat_completion(served):
    client = served.openai()
    response = client.responses.create(**ASKED, instructions="be brief", metadata={"mine": "1"}, user="ann")
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
        max_tokens=20,
        seed=5,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.id.startswith("resp_") and response.object == "response" and response.model == "tiny"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert usage.total_tokens == chat.usage.total_tokens
    assert (response.instructions, response.metadata, response.user) == ("be brief", {"mine": "1"}, "ann")
    assert (response.max_output_tokens, response.temperature, response.truncation) == (20, 1.0, "disabled")
    assert response.created_at <= response.completed_at <= time.time() + 1


def ending(engine, num_tokens=8):
    """Fields with which an answer ends by itself after so many tokens."""
    return {"min_tokens": num_tokens, "logit_bias": {str(engine.tokenizer.eos_token_id): 100}, "seed": 5}


def test_a_stream_adds_up_to_the_whole_answer(served):
    client = served.openai()
    asked = {**ASKED, "include": [LOGPROBS], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = events[4:-4]
    assert len(deltas) > 1 and {event.type for event in deltas} == {"response.output_text.delta"}
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 20 and all(len(each.top_logprobs) == 2 for each in logprobs)
    told = [each for event in deltas for each in event.logprobs]
    assert [(each.token, each.logprob) for each in told] == [(each.token, each.logprob) for each in logprobs]
    assert same(events[-1].response) == same(whole)
    assert events[0].response.id == events[-1].response.id != whole.id
    assert events[-1].response.output[0].id == events[2].item.id == events[4].item_id


def test_the_clients_stream_helper_takes_the_events(served):
    client = served.openai()
    asked = {"model": "tiny", "input": "hello there", "extra_body": {"seed": 5, "ignore_eos": True}}
    snapshots = []
    with client.responses.stream(**asked, max_output_tokens=20) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshots.append(event.snapshot)
            last = event
    assert last.type == "response.incomplete" and snapshots[-1] == last.response.output_text


def test_the_helpers_final_response_equals_the_whole_one(served, engine):
    asked = {"model": "tiny", "input": "hello there", "extra_body": ending(engine)}
    whole = served.openai().responses.create(**asked)
    with served.openai().responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert same(final) == same(whole) and final.output_text == whole.output_text != ""
    assert (whole.status, whole.error, whole.incomplete_details) == ("completed", None, None)
    assert whole.output[0].status == "completed" and whole.usage.output_tokens == 9


def test_stop_strings_complete_the_answer(served):
    text = served.openai().responses.create(**ASKED).output_text
    response = served.openai().responses.create(**{**ASKED, "extra_body": {"seed": 5, "stop": text[6:9]}})
    assert (response.status, response.output_text) == ("completed", text[: text.index(text[6:9])])


def chat_tokens(engine, *messages):
    """The number of a conversation's tokens, given (role, content)."""
    return len(engine.tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages]))


def test_a_conversation_goes_on_without_the_earlier_instructions(served, engine):
    client = served.openai()
    first = client.responses.create(**ASKED, instructions="be brief")
    second = client.responses.create(**{**ASKED, "input": "more"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = [("user", "hello there"), ("assistant", first.output_text), ("user", "more")]
    assert second.usage.input_tokens == chat_tokens(engine, *said)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": r, "content": c} for r, c in said], max_tokens=20, seed=5
    )
    assert second.output_text == chat.choices[0].message.content
    third = client.responses.create(**{**ASKED, "input": "and more"}, previous_response_id=second.id)
    said += [("assistant", second.output_text), ("user", "and more")]
    assert third.usage.input_tokens == chat_tokens(engine, *said)
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == said


def test_what_an_answer_says_can_be_sent_back(served, engine):
    client = served.openai()
    first = client.responses.create(**ASKED, store=False, include=[LOGPROBS])
    items = [{"role": "user", "content": "hello there"}, *first.output, {"role": "user", "content": "more"}]
    second = client.responses.create(**{**ASKED, "input": items})
    said = [("user", "hello there"), ("assistant", first.output_text), ("user", "more")]
    assert second.usage.input_tokens == chat_tokens(engine, *said)


def test_items_become_messages(served, engine):
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "type": "message"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
    ]
    response = served.openai().responses.create(**{**ASKED, "input": items}, instructions="be brief")
    said = [("system", "be brief\n\nbe kind"), ("user", "a"), ("assistant", "no"), ("user", "b\nc")]
    assert response.usage.input_tokens == chat_tokens(engine, *said)


class Fruit(BaseModel):
    name: Literal["apple", "pear"]


def test_answers_are_parsed_into_the_clients_models(served):
    asked = {"model": "tiny", "input": "a fruit?", "text_format": Fruit, "extra_body": {"seed": 1}}
    response = served.openai().responses.parse(**asked)
    assert response.output_parsed.name in ("apple", "pear")
    assert response.text.format.name == "Fruit" and response.status == "completed"
    with served.openai().responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    response = served.openai().responses.create(
        model="tiny",
        input="an object?",
        text={"format": {"type": "json_object"}},
        max_output_tokens=200,
        extra_body={"seed": 1},
    )
    assert response.output_text.lstrip().startswith("{") and response.text.format.type == "json_object"


def test_cached_tokens_are_told(served):
    asked = {**ASKED, "input": "a conversation that is long enough to fill some pages of the cache"}
    for _ in range(2):
        usage = served.openai().responses.create(**asked).usage
    assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens


def test_answers_are_kept_until_deleted(served):
    client = served.openai()
    made = client.responses.create(**ASKED)
    kept = client.responses.retrieve(made.id)
    assert kept.to_dict() == made.to_dict()
    stream = list(client.responses.create(**ASKED, stream=True))
    assert client.responses.retrieve(stream[-1].response.id).to_dict() == stream[-1].response.to_dict()
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=made.id):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match=made.id) as caught:
        client.responses.create(**ASKED, previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_stored_is_not(served):
    client = served.openai()
    num_kept = len(served.server.responses)
    made = client.responses.create(**ASKED, store=False)
    assert not made.store and len(served.server.responses) == num_kept
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_items_come_in_pages(served):
    client = served.openai()
    items = [{"role": "user", "content": f"item {index}"} for index in range(5)]
    made = client.responses.create(**{**ASKED, "input": items})

    def texts(page):
        return [item.content[0].text for item in page]

    page = client.responses.input_items.list(made.id, limit=2)
    assert texts(page.data) == ["item 4", "item 3"] and page.has_more
    assert texts(page) == [f"item {index}" for index in (4, 3, 2, 1, 0)]
    page = client.responses.input_items.list(made.id, order="asc", after=page.data[0].id)
    assert (texts(page.data), page.has_more) == ([], False)
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_no"}, "after")):
        answer = served.get(f"/v1/responses/{made.id}/input_items", params=query)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "query", [{"stream": "true"}, {"starting_after": 3}, {"include": "reasoning.encrypted_content"}]
)
def test_kept_answers_are_given_as_they_were_made(served, query):
    made = served.openai().responses.create(**ASKED)
    answer = served.get(f"/v1/responses/{made.id}", params=query)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(query))
    with_logprobs = served.openai().responses.create(**ASKED, include=[LOGPROBS])
    kept = served.openai().responses.retrieve(with_logprobs.id, include=[LOGPROBS])
    assert kept.output[0].content[0].logprobs


def test_only_the_owner_of_the_key_has_an_answer(serving):
    with serving(api_keys=KEYS) as found:
        ann, bob = (found.openai(key) for key in KEYS)
        made = ann.responses.create(**ASKED, user="bob")
        assert ann.responses.create(**ASKED, previous_response_id=made.id).previous_response_id == made.id
        for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(**ASKED, previous_response_id=made.id)
        assert ann.responses.retrieve(made.id).id == made.id


def test_answers_without_a_place_are_told_not_to_be_stored(serving):
    with serving(max_stored_responses=2) as found:
        client = found.openai()
        first, second = (client.responses.create(**ASKED) for _ in range(2))
        client.responses.retrieve(first.id)  # so that the second is the next to go
        third = client.responses.create(**ASKED)
        assert {client.responses.retrieve(each.id).id for each in (first, third)} == {first.id, third.id}
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
    with serving(max_responses_bytes=10) as found:
        assert not found.openai().responses.create(**ASKED).store
        with pytest.raises(openai.BadRequestError, match="10 bytes"):
            found.openai().responses.create(**ASKED, store=True)


def turns(num, store=None):
    """A conversation of so many turns, each of the same number of tokens."""
    roles = [role for _ in range(num) for role in ("user", "assistant")]
    said = [(role, f"{index // 2:02} of the conversation") for index, role in enumerate(roles)]
    return [*said, ("user", "and now?")]


def test_the_oldest_turns_are_left_out_where_asked(served, engine):
    client = served.openai()
    said = turns(20)
    items = [{"role": role, "content": content} for role, content in said]
    asked = {**ASKED, "input": items, "instructions": "be brief"}
    with pytest.raises(openai.BadRequestError, match="context is 256") as caught:
        client.responses.create(**asked)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    response = client.responses.create(**asked, truncation="auto")
    system = [("system", "be brief")]
    kept = [len(said) - 1 - 2 * num for num in range(20)]
    fitting = [start for start in kept if chat_tokens(engine, *system, *said[start:]) <= 256 - 20]
    assert response.usage.input_tokens == chat_tokens(engine, *system, *said[fitting[-1] :])
    assert response.truncation == "auto" and len(fitting) > 1
    with pytest.raises(openai.BadRequestError, match="context is 256"):
        client.responses.create(**{**asked, "input": "word " * 300}, truncation="auto")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": 7}, "input", "string"),
        ({"input": [{"role": "user"}]}, "input[0].content", "text"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "robot"),
        ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood", "no such field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "images",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
            "input[0].content[0]",
            "input_text",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [1]}]}]},
            "input[0].content[0].annotations",
            "leave them out",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 200}, "temperature", "100"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", "20"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata", "16"),
        ({"background": True}, "background", "False"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "instructions"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "missing"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name", "belongs"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            "text.format",
            "not supported",
        ),
        ({"truncation": "some"}, "truncation", "auto"),
        ({"max_tokens": 5}, "max_tokens", "no such field"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "resp_none"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, change, param, words):
    answer = served.post("/v1/responses", {"input": "hi", **change})
    error = answer.json()["error"]
    assert answer.status_code == (404 if words in ("resp_none", "other") else 400)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("field", [name for name, note in notes(ResponsesRequest).items() if isinstance(note, Refused)])
def test_what_this_server_does_not_have_is_refused(served, field):
    error = served.post("/v1/responses", {"input": "hi", field: {"type": "x"}}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert served.post("/v1/responses", {"input": "hi", field: None, "max_output_tokens": 1}).status_code == 200


def test_a_client_that_goes_frees_what_it_had(served, engine):
    body = {"input": "hello", "stream": True, "ignore_eos": True}
    with served.http.stream("POST", "/v1/responses", json=body) as stream:
        for line in stream.iter_lines():
            if "output_text.delta" in line:
                break
        assert engine.stats()["pages_used"] > 0
    wait_until(partial(is_idle, engine))


def test_a_timeout_leaves_a_failed_response_with_its_output(served):
    asked = {"model": "tiny", "input": "hello", "extra_body": {"timeout_s": 0.02, "ignore_eos": True}}
    whole = served.openai().responses.create(**asked)
    assert (whole.status, whole.error.code) == ("failed", "server_error") and "longer" in whole.error.message
    events = list(served.openai().responses.create(**asked, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"


def test_a_stream_that_cannot_go_on_ends_with_the_event(served, monkeypatch):
    monkeypatch.setattr("jaxinfer.serve.server.checked", failing)
    events = list(served.openai().responses.create(**ASKED, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "server_error" and "secret" not in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError, match="internal error"):
        served.openai().responses.create(**ASKED)


def failing(output):
    raise RuntimeError("a secret")


def make_stored(name, size_bytes):
    return StoredResponse({"id": name, "output": []}, (), size_bytes)


def test_the_store_drops_the_least_recently_used_of_who_has_most():
    store = ResponseStore(3, 100)
    store.put("ann", make_stored("a1", 30))
    store.put("bob", make_stored("b1", 10))
    store.put("ann", make_stored("a2", 30))
    assert store.get("ann", "a1") is not None and store.get("bob", "a1") is None
    store.put("bob", make_stored("b2", 10))  # a fourth
    assert store.get("ann", "a2") is None and store.get("bob", "b1") is not None and len(store) == 3
    store.put("bob", make_stored("b3", 75))  # too many bytes
    assert store.get("ann", "a1") is not None
    assert [store.get("bob", name) is not None for name in ("b1", "b2", "b3")] == [False, False, False]
    assert (len(store), store.size_bytes) == (1, 30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("xyz"), st.integers(0, 9), st.integers(0, 40))),
    st.integers(1, 5),
    st.integers(40, 80),
)
def test_the_store_keeps_its_bounds(steps, max_responses, max_bytes):
    store, sizes = ResponseStore(max_responses, max_bytes), {}
    for number, (kind, owner, which, size_bytes) in enumerate(steps):
        if kind == "p":
            store.put(owner, make_stored(f"{number}", size_bytes))
            sizes[owner, f"{number}"] = size_bytes
        elif kind == "g":
            store.get(owner, f"{which}")
        else:
            store.remove(owner, f"{which}")
        kept = {key: size for key, size in sizes.items() if key[1] in store._kept.get(key[0], {})}
        assert (len(store), store.size_bytes) == (len(kept), sum(kept.values()))
        assert len(store) <= max_responses and store.size_bytes <= max_bytes
        assert set(store._kept) == set(store._bytes_of) == {owner for owner, _ in kept}
