"""Embeddings through the OpenAI client, against pooling in float64 of states read in process."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from jaxinfer import SamplingParams
from tests.serve.conftest import running

TEXTS = ["hello there", "a longer text, of which the model reads several chunks " * 3, "x"]


def states_of(engine, text: str | list[int]) -> Any:
    """The hidden states `[T, D]` of a text, by the engine alone."""
    ids = engine.tokenizer.encode(text) if isinstance(text, str) else text
    params = SamplingParams(max_tokens=0, return_hidden_states=True)

    async def read() -> Any:
        async for output in engine.generate({"prompt_token_ids": ids}, params, output_kind="final"):
            return output.prompt_hidden_states

    return np.asarray(asyncio.run(read()), np.float64)


def unit(vector: Any) -> Any:
    return vector / np.sqrt((vector**2).sum())


def test_vectors_are_the_normalised_mean_of_the_states(served, engine):
    answer = served.openai().embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "tiny"
    for text, each in zip(TEXTS, answer.data, strict=True):
        expected = unit(states_of(engine, text).sum(0))
        assert len(each.embedding) == engine.embed_dim
        np.testing.assert_allclose(each.embedding, expected, atol=1e-6)
    num_tokens = sum(len(engine.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_the_last_token_alone_and_the_servers_own_pooling(served, engine):
    expected = unit(states_of(engine, TEXTS[0])[-1])
    asked = {"input": TEXTS[0]}
    found = served.post("/v1/embeddings", {**asked, "pooling": "last"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with running(engine, pooling="last") as other:
        assert other.post("/v1/embeddings", asked).json()["data"][0]["embedding"] == found
        mean = other.post("/v1/embeddings", {**asked, "pooling": "mean"}).json()["data"][0]["embedding"]
        assert mean == served.post("/v1/embeddings", asked).json()["data"][0]["embedding"] != found


def test_base64_is_what_the_client_asks_for_and_holds_the_same_numbers(served):
    numbers = served.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    texts = served.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    for one, other in zip(numbers, texts, strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert decoded.tolist() == np.float32(one["embedding"]).tolist()
    by_client = served.openai().embeddings.create(model="tiny", input=TEXTS).data  # base64 underneath
    assert [each.embedding for each in by_client] == [np.float32(each["embedding"]).tolist() for each in numbers]


def test_token_ids_are_read_as_they_are(served, engine):
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    by_text = served.post("/v1/embeddings", {"input": TEXTS}).json()
    assert served.post("/v1/embeddings", {"input": ids}).json() == by_text
    assert served.post("/v1/embeddings", {"input": ids[0]}).json()["data"] == by_text["data"][:1]
    bare = served.post("/v1/embeddings", {"input": TEXTS[0], "add_special_tokens": False}).json()
    assert bare["usage"]["prompt_tokens"] == len(engine.tokenizer.encode(TEXTS[0], False))


def test_fewer_dimensions_are_the_first_at_length_one(served, engine):
    whole = np.float64(served.post("/v1/embeddings", {"input": "hello"}).json()["data"][0]["embedding"])
    found = served.openai().embeddings.create(model="tiny", input="hello", dimensions=5).data[0].embedding
    np.testing.assert_allclose(found, unit(whole[:5]), atol=1e-6)
    for wrong in (0, engine.embed_dim + 1):
        error = served.post("/v1/embeddings", {"input": "x", "dimensions": wrong}).json()["error"]
        assert error["param"] == "dimensions" and str(engine.embed_dim) in error["message"]


def test_more_inputs_than_the_engine_runs_at_once(served, engine):
    texts = [f"text {number}" for number in range(40)]
    found = served.post("/v1/embeddings", {"input": texts}).json()["data"]
    alone = served.post("/v1/embeddings", {"input": texts[37]}).json()["data"][0]
    assert [each["index"] for each in found] == list(range(40))
    assert found[37]["embedding"] == alone["embedding"]
    refused = served.post("/v1/embeddings", {"input": ["x"] * 2049})
    assert refused.status_code == 400 and "2048" in refused.json()["error"]["message"]


def test_only_the_last_tokens_where_asked(served, engine):
    ids = engine.tokenizer.encode(TEXTS[1])
    cut = served.post("/v1/embeddings", {"input": TEXTS[1], "truncate_prompt_tokens": 7}).json()
    assert cut["usage"]["prompt_tokens"] == 7
    assert cut["data"] == served.post("/v1/embeddings", {"input": ids[-7:]}).json()["data"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": ["fine", "word " * 300]}, "input[1]", "context is 256"),
        ({"input": [[1, 2], []]}, "input[1]", "empty"),
        ({"input": [[1, 2], [99999]]}, "input", "99999"),
        ({"input": 5}, "input", "string"),
        ({"input": ["a", 5]}, "input", "string"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "x", "pooling": "max"}, "pooling", "mean"),
        ({"input": "x", "dimension": 5}, "dimension", "did you mean dimensions"),
        ({"input": "x", "priority": 1_000_001}, "priority", "1000000"),
        ({"input": "x", "timeout_s": -1}, "timeout_s", "above 0"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, body, param, words):
    answer = served.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error


def test_other_models_are_not_here(served):
    assert served.post("/v1/embeddings", {"model": "other", "input": "x"}).status_code == 404
