"""Random loads with all options, in caches that hold little more than one sequence: each request as it is alone."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, StructuredOutputsParams
from jaxinfer.request import RequestOptions, RequestOutput

SETTINGS = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32, "verbose": False}
VOCAB, NUM_LOADS = 112, 6
OF_REQUEST = ("prompt_logprobs", "prompt_hidden_states", "finished")
OPTIONAL: dict[str, Any] = {
    "n": lambda chance: chance.choice([2, 3]),
    "top_k": lambda chance: chance.choice([1, 3, 20]),
    "top_p": lambda chance: 0.8,
    "repetition_penalty": lambda chance: chance.choice([0.5, 1.3]),
    "frequency_penalty": lambda chance: chance.choice([-1.0, 1.5]),
    "logit_bias": lambda chance: {chance.randrange(VOCAB): 5.0},
    "bad_words": lambda chance: [chance.choice("abcxyz0123") + chance.choice("abc ") for _ in range(8)] + ["e"],
    "stop": lambda chance: [chance.choice("abcdefgh012345") for _ in range(3)],
    "stop_token_ids": lambda chance: [chance.randrange(VOCAB)],
    "min_tokens": lambda chance: 1,
    "ignore_eos": lambda chance: True,
    "logprobs": lambda chance: chance.choice([0, 5]),
    "prompt_logprobs": lambda chance: chance.choice([0, 2]),
    "return_hidden_states": lambda chance: True,
    "return_logits": lambda chance: True,
    "structured_outputs": lambda chance: StructuredOutputsParams(
        regex=chance.choice(["[ -~]{0,20}", "[a-p ]+|[A-Z]+"])
    ),
}


def params_of(chance: random.Random) -> SamplingParams:
    chosen = {name: make(chance) for name, make in OPTIONAL.items() if chance.random() < 0.2}
    length = chance.choice([1, 2, 13, 24, 24] if "min_tokens" in chosen else [0, 1, 2, 13, 24, 24])
    return SamplingParams(
        seed=chance.randrange(1000), max_tokens=length, temperature=chance.choice([0, 0.7, 1.5]), **chosen
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


def differences(one: RequestOutput, other: RequestOutput) -> list[str]:
    found = [name for name in OF_REQUEST if not same(getattr(one, name), getattr(other, name))]
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        found += [each.name for each in fields(mine) if not same(getattr(mine, each.name), getattr(theirs, each.name))]
    return found


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams, RequestOptions]], chance: random.Random):
    """The outputs by place, where requests come while others run and some are aborted."""
    engine, outputs, coming = llm.engine, {}, list(enumerate(requests))
    while coming or engine.has_work:
        while coming and (not engine.has_work or chance.random() < 0.9):
            index, (prompt, params, options) = coming.pop(0)
            engine.add(str(index), prompt, params, options=options)
        if chance.random() < 0.02:
            engine.abort(str(chance.randrange(len(requests))))
        outputs.update((int(output.request_id), output) for output, _ in engine.step() if output.finished)
    return outputs


@pytest.fixture(scope="module")
def alone(tiny_model_path):
    with LLM(str(tiny_model_path), enable_prefix_caching=False, overlap=False, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("page_size, num_pages, overlap", [(4, 33, True), (16, 10, False)])
def test_every_request_of_a_random_load_is_as_it_is_alone(tiny_model_path, alone, page_size, num_pages, overlap):
    settings = {"page_size": page_size, "num_pages": num_pages, "overlap": overlap}
    with LLM(str(tiny_model_path), **SETTINGS, **settings) as llm:
        for seed in range(NUM_LOADS):
            chance = random.Random(seed)
            base = [chance.randrange(VOCAB) for _ in range(100)]
            requests = []
            for _ in range(chance.randrange(6, 12)):
                prompt = base[: chance.choice([1, 4, 5, 8, 15, 16, 17, 32, 33, 64, 80, 100])]
                prompt[len(prompt) - chance.randrange(len(prompt)) :] = [7] * chance.randrange(3)
                options = RequestOptions(
                    chance.choice([0, 0, -1, 3]), chance.choice("ab"), chance.choice(["", "", "s"])
                )
                requests.append((prompt, params_of(chance), options))
            for index, output in run(llm, requests, chance).items():
                prompt, params, _ = requests[index]
                (expected,) = alone.generate({"prompt_token_ids": prompt}, params)
                assert not differences(output, expected), (seed, index, requests[index])
        stats = llm.stats()
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0 and stats["pages_used"] == 0
