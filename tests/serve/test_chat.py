"""Chat completions through the OpenAI client."""

from __future__ import annotations

import json

import pytest

MESSAGES = [{"role": "user", "content": "hello there"}]


def whole_of(chunks):
    """The choices that chunks add up to: index to (text, finish_reason)."""
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return {index: (texts[index], reasons[index]) for index in texts}


def test_a_stream_adds_up_to_the_whole_answer(served):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "seed": 5, "n": 3, "temperature": 0.9}
    client = served.openai()
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "chat.completion" and whole.model == "tiny" and whole.id.startswith("chatcmpl-")
    assert {c.index: (c.message.content, c.finish_reason) for c in whole.choices} == whole_of(chunks)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices and chunk.choices[0].delta.role]
    assert roles == ["assistant"] * 3
    *others, last = chunks
    assert last.choices == [] and all(chunk.usage is None for chunk in others)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert whole.usage.completion_tokens == 60 and whole.usage.total_tokens == 60 + whole.usage.prompt_tokens


def test_the_answer_is_what_the_engine_gives(served, engine):
    ids = engine.tokenizer.apply_chat_template(MESSAGES)
    answer = served.openai().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    direct = served.post("/v1/completions", {"prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": 3}).json()[
        "choices"
    ][0]
    assert answer.choices[0].message.content == direct["text"]
    content = answer.choices[0].logprobs.content
    assert [each.logprob for each in content] == direct["logprobs"]["token_logprobs"]
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content), "greedy takes the likeliest"
    assert b"".join(bytes(each.bytes) for each in content).decode(errors="replace") == answer.choices[0].message.content


def test_without_max_tokens_the_context_is_the_limit(served, engine):
    answer = served.openai().chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == engine.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_cached_tokens_are_told(served):
    messages = [{"role": "user", "content": "a conversation that is long enough to fill some pages of the cache"}]
    for _ in range(2):
        answer = served.openai().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    details = answer.usage.prompt_tokens_details
    assert 0 < details.cached_tokens < answer.usage.prompt_tokens


def test_the_final_message_can_be_continued(served, engine):
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True, "max_tokens": 1}
    ids = served.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert engine.tokenizer.decode(ids).endswith("I am")
    body = {"messages": messages, "add_generation_prompt": False, "return_token_ids": True, "max_tokens": 1}
    ids = served.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert ids == engine.tokenizer.apply_chat_template(messages, add_generation_prompt=False)


def test_stop_strings_end_and_are_told(served):
    free = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40, "seed": 1}).json()
    text = free["choices"][0]["message"]["content"]
    stop = text[10:12]
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 1, "stop": [stop]}
    choice = served.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "not one of"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"audio": {"voice": "x"}}, "audio", "no audio"),
        ({"modalities": ["audio"]}, "modalities[0]", "text"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"chat_template_kwargs": {"nonsense": 1}}, None, "nonsense"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "cannot be set"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages", "context is 256"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, change, param, words):
    answer = served.post("/v1/chat/completions", {"messages": MESSAGES, **change})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_every_chunk_has_usage_where_it_is_asked_for(served):
    body = {"messages": [{"role": "user", "content": "a"}]} | {"max_tokens": 2, "stream": True, "ignore_eos": True}
    text = served.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 2 and not chunks[-1]["choices"]
    assert all("logprobs" in choice for chunk in chunks for choice in chunk["choices"])
    assert "usage" not in served.post("/v1/chat/completions", body).text
