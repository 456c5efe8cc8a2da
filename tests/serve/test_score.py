"""Scores over HTTP, against `LLM.score` on a model of its own in this process."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import ENGINE, TINY

PROMPTS = ["the quick brown", "one two three four", "a"]
CONTINUATIONS = [[" fox", " dog jumps"], [" five"], ["b", " c d", "!"]]


@pytest.fixture(scope="module")
def llm(engine: Any) -> Iterator[Any]:
    """The same model in process, with the engine's settings, so that the same programs serve it."""
    from jaxinfer import LLM

    with LLM(TINY, **ENGINE) as found:
        yield found


def test_likelihoods_are_those_of_score(served, llm):
    answer = served.post("/v1/score", {"model": "tiny", "prompt": PROMPTS, "continuations": CONTINUATIONS}).json()
    expected = llm.score(PROMPTS, CONTINUATIONS)
    flat = [(index, each) for index, group in enumerate(expected) for each in group]
    assert answer["object"] == "list" and [each["index"] for each in answer["data"]] == list(range(6))
    for found, (prompt_index, each) in zip(answer["data"], flat, strict=True):
        assert found["prompt_index"] == prompt_index and found["object"] == "score"
        assert found["score"] == each.logprob < 0
        assert (found["is_greedy"], found["token_ids"]) == (each.is_greedy, each.token_ids)
        assert found["token_logprobs"] == each.token_logprobs


def test_one_prompt_and_token_ids(served, llm):
    head, tail = llm.tokenizer.encode("hello"), llm.tokenizer.encode(" world", False)
    (expected,) = llm.score({"prompt_token_ids": head}, [{"prompt_token_ids": tail}])
    for continuations in (tail, [tail]):
        (found,) = served.post("/v1/score", {"prompt": head, "continuations": continuations}).json()["data"]
        assert found["score"] == expected.logprob and found["token_ids"] == tail
    one, other = served.post("/v1/score", {"prompt": "hello", "continuations": [" world", tail]}).json()["data"]
    assert [one["score"], other["score"]] == [
        llm.score("hello", " world")[0].logprob,
        llm.score("hello", {"prompt_token_ids": tail})[0].logprob,
    ]


def test_what_lm_evaluation_harness_sends_scores_as_score_does(served, llm):
    """Its local-completions: prompt ids, echo and logprobs; it drops the last entry, of the token that is drawn."""
    pairs = [(prompt, each) for prompt, group in zip(PROMPTS, CONTINUATIONS, strict=True) for each in group]
    expected = [llm.score(prompt, each)[0] for prompt, each in pairs]
    for tokenized in (True, False):
        texts = [prompt + each for prompt, each in pairs]
        body = {
            "model": "tiny",
            "prompt": [llm.tokenizer.encode(text) for text in texts] if tokenized else texts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        choices = sorted(served.post("/v1/completions", body).json()["choices"], key=itemgetter("index"))
        for choice, score, text in zip(choices, expected, texts, strict=True):
            length = len(llm.tokenizer.encode(text))
            first = length - len(score.token_ids)
            logprobs = choice["logprobs"]["token_logprobs"][first:-1]
            tops = choice["logprobs"]["top_logprobs"][first:-1]
            assert logprobs == score.token_logprobs and sum(logprobs) == score.logprob
            greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
            assert greedy == score.is_greedy


def test_similarities_are_cosines_of_embeddings(served):
    one, many = "hello there", ["hello here", "a quite different text"]
    vectors = [
        np.array(each["embedding"])
        for each in served.post("/v1/embeddings", {"input": [one, *many], "pooling": "last"}).json()["data"]
    ]
    asked = {"text_1": one, "text_2": many, "pooling": "last"}
    found = [each["score"] for each in served.post("/v1/score", asked).json()["data"]]
    np.testing.assert_allclose(found, [vectors[0] @ vectors[1], vectors[0] @ vectors[2]], atol=1e-6)
    pairwise = served.post("/score", {"text_1": many, "text_2": many}).json()
    np.testing.assert_allclose([each["score"] for each in pairwise["data"]], [1, 1], atol=1e-9)
    assert pairwise["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "one of the two"),
        ({"prompt": "a", "continuations": "b", "text_1": "c", "text_2": "d"}, "prompt", "one of the two"),
        ({"prompt": "a"}, "continuations", "missing"),
        ({"text_2": "a"}, "text_1", "missing"),
        ({"prompt": "a", "continuations": []}, "continuations", "empty"),
        ({"prompt": "a", "continuations": [""]}, "continuations", "nothing to score"),
        ({"prompt": ["a", "b"], "continuations": ["c"]}, "continuations", "one for each"),
        ({"prompt": [], "continuations": []}, "continuations", "one for each"),
        ({"prompt": "a", "continuations": [" b", " c" * 300]}, "continuations", "continuations[1]"),
        ({"prompt": [1, 99999], "continuations": "b"}, "prompt", "99999"),
        ({"prompt": "a", "continuations": "b", "pooling": "last"}, "pooling", "belongs"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many"),
        ({"text_1": "a", "text_2": []}, "text_2", "empty"),
        ({"text_1": "a", "text_2": ["b"] * 2048}, "text_2", "2048"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, body, param, words):
    answer = served.post("/v1/score", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
