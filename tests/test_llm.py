"""The doors on the real model: golden text, mixtures that change nothing, every option by its effect, bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams

ITEMS = json.loads((Path(__file__).parent / "golden" / "smollm2_f32.json").read_text())["items"]
TINY = str(Path(__file__).parent.parent / "checkpoints" / "tiny-llama")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    yield
    llm.engine.scheduler.check_integrity()
    stats = llm.stats()
    assert (stats["pages_used"], stats["num_running"], stats["queue_len"], stats["num_compiles"]) == (0, 0, 0, 6)


def one(llm, prompt="The capital of France is", **fields):
    return llm.generate(prompt, SamplingParams(**{**GREEDY, "max_tokens": 8, **fields}))[0].outputs[0]


def test_golden_in_one_mixed_batch(llm):
    params = SamplingParams(max_tokens=16, logprobs=1, skip_special_tokens=False, **GREEDY)
    outputs = llm.generate([{"prompt_token_ids": item["prompt_ids"]} for item in ITEMS], params)
    for output, item in zip(outputs, ITEMS, strict=True):
        choice = output.outputs[0]
        assert choice.token_ids == item["ids"][:16]
        for token, found, expected in zip(choice.token_ids, choice.logprobs, item["logprobs"], strict=False):
            assert found[token].rank == 1 and abs(found[token].logprob - expected) < 1e-3
        assert output.metrics["ttft_s"] <= output.metrics["e2e_s"]


def test_same_request_same_tokens_alone_and_among_others(llm):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2)
    alone = llm.generate("Once upon a time", params)[0].outputs[0]
    prompts = ["Hello " * 90, "Once upon a time", "1 2 3", "x"]
    among = llm.generate(prompts, params)[1].outputs[0]
    assert alone.token_ids == among.token_ids and alone.logprobs == among.logprobs


def test_without_a_seed_equal_prompts_differ(llm):
    outputs = llm.generate(["Once upon a time"] * 6, SamplingParams(max_tokens=8))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 6
    choices = llm.generate("Once upon a time", SamplingParams(max_tokens=8, n=4, seed=1))[0].outputs
    assert len({tuple(choice.token_ids) for choice in choices}) == 4
    assert [choice.index for choice in choices] == [0, 1, 2, 3]


def test_options_by_their_effect(llm):
    first = one(llm).token_ids[0]
    assert one(llm, logit_bias={first: -100}).token_ids[0] != first
    assert set(one(llm, allowed_token_ids=[5, 6]).token_ids) <= {5, 6}
    assert one(llm, temperature=1.0, top_k=1).token_ids == one(llm).token_ids
    assert one(llm, temperature=1.0, top_p=1e-6).token_ids == one(llm).token_ids
    assert one(llm, temperature=1.0, min_p=1.0).token_ids == one(llm).token_ids
    repeated = one(llm, "a a a a a a a a a a", max_tokens=12).token_ids
    assert len(set(one(llm, "a a a a a a a a a a", max_tokens=12, frequency_penalty=2.0).token_ids)) > len(
        set(repeated)
    )
    assert len(set(one(llm, "a a a a a a a a a a", max_tokens=12, repetition_penalty=5.0).token_ids)) > len(
        set(repeated)
    )


def test_where_an_output_ends(llm):
    whole = one(llm, max_tokens=16)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 16)
    stopped = one(llm, max_tokens=16, stop=["answer"])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "answer")
    assert stopped.text == whole.text.split("answer")[0]
    assert one(llm, max_tokens=16, stop="answer", include_stop_str_in_output=True).text.endswith("answer")
    by_id = one(llm, stop_token_ids=[whole.token_ids[2]])
    assert (by_id.stop_reason, len(by_id.token_ids)) == (whole.token_ids[2], 3)
    late = one(llm, max_tokens=16, stop_token_ids=[whole.token_ids[2]], min_tokens=6)
    assert len(late.token_ids) >= 6 and late.token_ids[2] != whole.token_ids[2]
    ended = one(llm, ITEMS[0]["prompt"], ignore_eos=False, max_tokens=40)
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", ITEMS[0]["first_eos"] + 1)
    full = llm.generate({"prompt_token_ids": [5] * 1020}, SamplingParams(max_tokens=None, **GREEDY))[0].outputs[0]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 4)


def test_stream_chat_and_generate_agree(llm):
    params = SamplingParams(max_tokens=12, **GREEDY)
    pieces = list(llm.stream("The capital of France is", params))
    assert len(pieces) > 3 and "".join(pieces) == one(llm, max_tokens=12).text
    messages = [{"role": "user", "content": "Hi"}]
    ids = llm.tokenizer.apply_chat_template(messages)
    chat = llm.chat(messages, params)[0]
    assert chat.prompt_token_ids == ids
    assert chat.outputs[0].text == one(llm, {"prompt_token_ids": ids}, max_tokens=12).text
    stream = llm.stream("Hello", params)
    next(stream)
    stream.close()


def test_a_request_can_be_aborted_when_one_of_its_choices_has_ended(llm):
    engine = llm.engine

    def until(reached):
        while True:
            for output, _ in engine.step():
                if reached(output):
                    return output

    ids = llm.tokenizer.encode("Once upon a time")
    engine.add("two", ids, SamplingParams(n=2, temperature=9.0, seed=1, max_tokens=8, ignore_eos=True))
    output = until(lambda output: all(choice.token_ids for choice in output.outputs))
    first, second = [choice.token_ids[0] for choice in output.outputs]
    engine.abort("two")
    assert first != second, "the seed no longer gives choices that can end apart"
    engine.add(
        "two", ids, SamplingParams(n=2, temperature=9.0, seed=1, max_tokens=8, ignore_eos=True, stop_token_ids=[first])
    )
    output = until(lambda output: output.outputs[0].finish_reason)
    assert [choice.finish_reason for choice in output.outputs] == ["stop", None]
    engine.abort("two")
    assert engine.step() == []


def test_logprobs_are_those_of_the_raw_model(llm):
    found = one(llm, logprobs=5, logit_bias={7042: -100}, max_tokens=1).logprobs[0]
    assert len(found) >= 5 and found[7042].rank == 1
    assert math.exp(found[7042].logprob) > 0.5


@pytest.mark.parametrize(
    "field,value",
    [
        ("temperature", -1), ("temperature", math.nan), ("top_p", 0), ("top_k", -2), ("min_p", 2), ("n", 0),
        ("max_tokens", -1), ("seed", -1), ("logprobs", 21), ("stop", [""]), ("allowed_token_ids", []),
        ("logit_bias", {1: 1000}), ("min_tokens", 99), ("repetition_penalty", 0), ("presence_penalty", 3),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_bad_requests_are_refused_and_change_nothing(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate("")
    with pytest.raises(ValueError, match="max_model_len=1024"):
        llm.generate({"prompt_token_ids": [1] * 1024})
    with pytest.raises(ValueError, match="prompt_token_ids: token id 49152"):
        llm.generate([{"prompt": "fine"}, {"prompt_token_ids": [49152]}])
    with pytest.raises(ValueError, match="a prompt needs"):
        llm.generate({"text": "no"})
    with pytest.raises(ValueError, match="stop_token_ids"):
        one(llm, stop_token_ids=[-1])
    with pytest.raises(ValueError, match="max_model_len=9000"):
        LLM(TINY, max_model_len=9000, verbose=False)
    with pytest.raises(ValueError, match="dtype='int3'"):
        LLM(dtype="int3")


@pytest.mark.slow
def test_the_chat_command(tmp_path):
    lines = "/set temperature 0.0\n/set max_tokens 8\n/set top_p 7.0\nHi\n/clear\n/help\n/exit\n"
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer.chat", "--model", TINY, "--max-model-len", "128"],
        input=lines, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert "top_p=7.0 must be" in done.stdout and "Ctrl-C stops an answer" in done.stdout
    missing = subprocess.run(
        [sys.executable, "-m", "jaxinfer.chat", "--model", "./nowhere.gguf"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert missing.returncode == 1 and "nowhere.gguf" in missing.stdout
