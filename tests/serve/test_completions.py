"""Completions through the OpenAI client, and as evaluation harnesses ask for them."""

from __future__ import annotations

import json

import pytest

from jaxinfer import LLM

PROMPT = "once upon a time"


def test_a_stream_adds_up_to_the_whole_answer(served):
    client = served.openai()
    asked = {"model": "tiny", "prompt": [PROMPT, "two"], "max_tokens": 16, "seed": 3, "n": 2, "logprobs": 2}
    whole = client.completions.create(**asked, echo=True)
    texts, ids, offsets = {}, {}, {}
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert {choice.index: choice.text for choice in whole.choices} == texts
    assert {choice.index: choice.logprobs.token_logprobs for choice in whole.choices} == ids
    assert {choice.index: choice.logprobs.text_offset for choice in whole.choices} == offsets
    assert [choice.text.startswith(PROMPT) for choice in whole.choices] == [True, True, False, False]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_end_of_a_choice_is_told_once(served, path):
    """The choices end one after the other; what comes after one's end is of the others."""
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**asked, "n": 4, "max_tokens": 60, "seed": 1, "stop": ["a", "e", "i"], "stream": True}
    with served.http.stream("POST", path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    told = [each for line in lines[:-1] for each in json.loads(line)["choices"]]
    ended = [each["index"] for each in told if each["finish_reason"] is not None]
    assert sorted(ended) == [0, 1, 2, 3]
    for index in range(4):
        assert [each for each in told if each["index"] == index][-1]["finish_reason"] is not None
    between = told[[each["finish_reason"] is not None for each in told].index(True) + 1 : -1]
    assert any(each["finish_reason"] is None for each in between), "they did not end one after the other"


def test_echoed_logprobs_are_those_of_score(served, engine, tiny_settings):
    """What lm-evaluation-harness asks of `local-completions`: echo, log-probabilities and one token."""
    context, continuation = "the cat sat", " on the mat"
    with LLM(**tiny_settings) as llm:
        (score,) = llm.score(context, continuation)
    tokenizer = engine.tokenizer
    ids = [*tokenizer.encode(context), *score.token_ids]
    body = {"model": "tiny", "prompt": [ids], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    (choice,) = served.post("/v1/completions", body).json()["choices"]
    start, found = len(ids) - len(score.token_ids), choice["logprobs"]
    assert found["token_logprobs"][start:-1] == score.token_logprobs
    likeliest = [max(top, key=top.__getitem__) for top in found["top_logprobs"][start:-1]]
    assert (likeliest == found["tokens"][start:-1]) == score.is_greedy
    assert sum(found["token_logprobs"][start:-1]) == pytest.approx(score.logprob, rel=1e-12)


def test_reading_alone_makes_no_token(served):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = served.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_choices_that_are_left_out_are_counted(served, stream):
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "best_of": 4, "n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *_, last, _, _ = served.post("/v1/completions", body).text.split("\n\n")
        usage = json.loads(last.removeprefix("data: "))["usage"]
    else:
        usage = served.post("/v1/completions", body).json()["usage"]
    assert usage["completion_tokens"] == 20


def test_text_offsets_point_into_the_text(served):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 3, "logprobs": 1, "allowed_token_ids": [70, 75, 80]}
    (choice,) = served.post("/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_many_prompts_are_answered_in_their_order(served):
    prompts = [f"number {index}" for index in range(12)]
    one_by_one = [
        served.post("/v1/completions", {"prompt": prompt, "temperature": 0}).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    choices = served.post("/v1/completions", {"prompt": prompts, "temperature": 0}).json()["choices"]
    assert [choice["text"] for choice in choices] == one_by_one
    assert [choice["index"] for choice in choices] == list(range(12))


def test_events_are_as_the_standard_has_them(served):
    with served.http.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers and answer.headers["cache-control"] == "no-cache"
        lines = "".join(answer.iter_text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": [[70], []]}, "prompt[1]", "empty"),
        ({"prompt": [70, -1]}, "prompt", "-1"),
        ({"prompt": [70, 10**30]}, "prompt", "vocabulary"),
        ({"prompt": 7}, "prompt", "string"),
        ({"prompt": None}, "prompt", "not None"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": [70] * 257}, "prompt", "257 tokens and this model's context is 256"),
        ({"prompt": [70] * 256}, "prompt", "256"),
        ({"temperature": -1}, "temperature", "from 0"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"n": 0}, "n", "from 1"),
        ({"n": 1.5}, "n", "integer"),
        ({"n": 129}, "n", "128"),
        ({"n": 3, "best_of": 2}, "best_of", "from 3"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"max_tokens": -1}, "max_tokens", "from 0"),
        ({"min_tokens": 20}, "min_tokens", "exceeds max_tokens=16"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        ({"logit_bias": {"70": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "vocabulary"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"seed": -1}, "seed", "from 0"),
        ({"priority": 2**31}, "priority", "1000000"),
        ({"timeout_s": 0}, "timeout_s", "above 0"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs", "echo"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include", "no such field"),
        ({"suffix": "end"}, "suffix", "suffix"),
        ({"best_off": 1}, "best_off", "did you mean best_of?"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, change, param, words):
    raw = json.dumps({"prompt": PROMPT, **change})
    answer = served.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "JSON object"),
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe", "not"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", ""),
    ],
)
def test_what_is_no_body_is_refused(served, raw, words):
    answer = served.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(served):
    assert served.get("/v1/completions").status_code == 405
    answer = served.post("/v1/nothing", {})
    assert answer.status_code == 404 and "/v1/nothing" in answer.json()["error"]["message"]
    assert served.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_models_tell_their_length(served, engine):
    models = served.openai().models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    assert models[0].max_model_len == engine.max_model_len
    assert served.openai().models.retrieve("tiny").id == "tiny"


def test_every_chunk_has_usage_where_it_is_asked_for(served):
    body = {"prompt": "a"} | {"max_tokens": 2, "stream": True, "ignore_eos": True}
    text = served.post("/v1/completions", {**body, "stream_options": {"include_usage": True}}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 2 and not chunks[-1]["choices"]
    assert all("logprobs" in choice for chunk in chunks for choice in chunk["choices"])
    assert "usage" not in served.post("/v1/completions", body).text
