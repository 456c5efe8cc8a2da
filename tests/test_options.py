"""Sampling options that touch prompts, choices and the device's raw values, on the real model, each by its effect."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, RequestError, SamplingParams, StructuredOutputsParams, generate

ITEMS = json.loads((Path(__file__).parent / "golden" / "smollm2_f32.json").read_text())["items"]
PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM):
    yield
    llm.engine.scheduler.check_integrity()
    stats = llm.stats()
    assert (stats["pages_used"], stats["num_running"], stats["queue_len"], stats["num_compiles"]) == (0, 0, 0, 6)


def run(llm, prompt=PROMPT, **fields):
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **fields}
    return llm.generate(prompt, SamplingParams(**params))[0]


def one(llm, prompt=PROMPT, **fields):
    return run(llm, prompt, **fields).outputs[0]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


@pytest.mark.parametrize("item", ITEMS[:4], ids=[item["name"] for item in ITEMS[:4]])
def test_prompt_logprobs_of_a_golden_continuation(llm, item):
    ids = [*item["prompt_ids"], *item["ids"][:16]]
    output = run(llm, {"prompt_token_ids": ids}, max_tokens=0, prompt_logprobs=0)
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    for token, entry, expected in zip(item["ids"], output.prompt_logprobs[-16:], item["logprobs"], strict=False):
        assert list(entry) == [token] and entry[token].rank == 1
        assert abs(entry[token].logprob - expected) < 1e-3


def test_prompt_logprobs_over_chunks_and_tiles(llm):
    """200 tokens come in 4 chunks and the head takes 64 rows at a time; the reference is float64 on the raw logits."""
    ids = np.random.default_rng(0).integers(0, 49152, 200).tolist()
    plain = {"prompt_token_ids": ids}
    output = run(llm, plain, max_tokens=2, prompt_logprobs=3, return_hidden_states=True, return_logits=True)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 200
    assert output.prompt_hidden_states.shape == (200, 576)
    expected = log_softmax(llm.engine.runner.logits_of(jnp.asarray(output.prompt_hidden_states)))
    order = np.argsort(-expected, axis=-1)[:, :3]
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        row = expected[position - 1]
        assert abs(entry[ids[position]].logprob - row[ids[position]]) < 1e-4
        assert entry[ids[position]].rank == 1 + (row > row[ids[position]]).sum()
        assert set(entry) == {ids[position], *order[position - 1].tolist()}
    choice = output.outputs[0]
    np.testing.assert_array_equal(choice.hidden_states[0], output.prompt_hidden_states[-1])
    assert choice.logits.argmax(-1).tolist() == choice.token_ids
    alone = run(llm, plain, max_tokens=2, prompt_logprobs=3)
    assert alone.prompt_logprobs == output.prompt_logprobs and alone.prompt_hidden_states is None


def test_prompt_logprobs_beside_other_requests(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    alone = llm.generate(PROMPT, params)[0]
    plain = SamplingParams(max_tokens=5, temperature=1.0)
    among = llm.generate(["word " * 100, PROMPT, "x"], [plain, params, plain])
    assert among[1].prompt_logprobs == alone.prompt_logprobs
    assert among[0].prompt_logprobs is None and len(among[0].outputs[0].token_ids) == 5


def test_scores_are_sums_of_golden_logprobs(llm):
    chosen = [item for item in ITEMS if len(item["prompt_ids"]) < 900][:3]
    prompts = [{"prompt_token_ids": item["prompt_ids"]} for item in chosen]
    wrong = {"prompt_token_ids": [7, 8]}
    scores = llm.score(prompts, [[{"prompt_token_ids": item["ids"][:12]}, wrong] for item in chosen])
    for (right, other), item in zip(scores, chosen, strict=True):
        assert right.is_greedy and abs(right.logprob - sum(item["logprobs"][:12])) < 5e-3
        assert not other.is_greedy and other.logprob < right.logprob
    (paris, london) = llm.score(PROMPT, [" Paris", " London"])
    assert paris.is_greedy and paris.logprob > london.logprob and len(paris.token_logprobs) == 1
    assert llm.score(PROMPT, " Paris") == [paris]


def test_a_score_counts_tokens_across_the_boundary(llm):
    """ "Hel" + "lo" is the one token "Hello": the score is that of the text, and takes the token before it."""
    text, end = "I say: Hel", "lo"
    whole = llm.tokenizer.encode(text + end)
    score = llm.score(text, end)[0]
    assert score.token_ids == whole[-len(score.token_ids) :]
    assert llm.tokenizer.decode(whole[: -len(score.token_ids)]) in text


def test_bad_scores_are_refused(llm):
    with pytest.raises(ValueError, match="continuation is empty"):
        llm.score(PROMPT, "")
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.score("", " Paris")
    with pytest.raises(ValueError, match="2 prompts and 1"):
        llm.score([PROMPT, PROMPT], [" Paris"])


def test_best_of_takes_the_likeliest_choices(llm):
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    every = run(llm, n=5, **fields).outputs
    best = run(llm, n=2, best_of=5, **fields).outputs
    mean = [choice.cumulative_logprob / len(choice.token_ids) for choice in every]
    expected = [every[index].token_ids for index in np.argsort(mean)[::-1][:2]]
    assert [choice.token_ids for choice in best] == expected and [choice.index for choice in best] == [0, 1]
    with pytest.raises(ValueError, match="best_of=1 must be a whole number from 2"):
        SamplingParams(n=2, best_of=1)
    with pytest.raises(ValueError, match="best_of=3"):
        list(llm.stream(PROMPT, SamplingParams(best_of=3)))


def test_cumulative_logprob_sums_the_tokens(llm):
    choice = one(llm, temperature=1.0, seed=1, logprobs=0)
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_bad_words_leave_the_text(llm):
    assert "Paris" in one(llm).text
    text = one(llm, bad_words=["Paris", "paris", "answer"], max_tokens=24).text
    assert text and not any(word in text for word in ("Paris", "paris", "answer"))
    across = "swer is"  # parts of two tokens
    assert across in one(llm).text and across not in one(llm, bad_words=[across], max_tokens=24).text
    refused = one(llm, allowed_token_ids=[llm.tokenizer.encode(" Paris")[0]], bad_words=["Paris"])
    reason = "no token is allowed: allowed_token_ids and bad_words together leave none after 0 tokens"
    assert (refused.finish_reason, refused.stop_reason) == ("error", reason)


def test_a_form_is_kept_beside_other_requests(llm):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    form = StructuredOutputsParams(json={**schema, "additionalProperties": False}, disable_any_whitespace=True)
    fields = [{"structured_outputs": form, "max_tokens": 24}, {"ignore_eos": True, "max_tokens": 8}]
    params = [SamplingParams(temperature=0.0, **each) for each in fields]
    formed, free = (output.outputs[0] for output in llm.generate([PROMPT] * 2, params))
    assert list(json.loads(formed.text)) == ["city"] and formed.finish_reason == "stop"
    assert free.token_ids == one(llm).token_ids


def test_typical_p_takes_the_token_of_typical_surprise(llm):
    choice = one(llm, "Once upon a time", temperature=1.0, typical_p=1e-6, return_logits=True, seed=1)
    logprobs = log_softmax(choice.logits)
    surprise = -(np.exp(logprobs) * logprobs).sum(-1, keepdims=True)
    assert choice.token_ids == np.abs(-logprobs - surprise).argmin(-1).tolist()
    assert choice.token_ids != choice.logits.argmax(-1).tolist()


def test_a_logits_processor_acts_on_the_requests_that_name_it(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    fields = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    favoured = SamplingParams(logits_processors={"favour": {"token": 77, "amount": 1000}}, **fields)
    idle = SamplingParams(logits_processors=["favour"], **fields)
    outputs = llm.generate([PROMPT] * 3, [plain, favoured, idle])
    expected = one(llm, max_tokens=4).token_ids
    assert [output.outputs[0].token_ids for output in outputs] == [expected, [77] * 4, expected]
    with pytest.raises(ValueError, match="'missing' is not registered"):
        run(llm, logits_processors=["missing"])
    with pytest.raises(ValueError, match="no parameter 'strength'"):
        run(llm, logits_processors={"favour": {"strength": 1}})


def test_new_parameters_take_effect_without_a_compile(llm):
    before = one(llm).token_ids
    params = llm.params
    with pytest.raises(ValueError, match="norm.weight is missing"):
        llm.update_params({key: value for key, value in jax.tree.map(lambda x: x, params).items() if key != "norm"})
    with pytest.raises(ValueError, match=r"embed has shape \(3,\)"):
        llm.update_params({**params, "embed": np.zeros(3, np.float32)})
    try:
        llm.update_params(jax.tree.map(lambda leaf: -leaf, params))
        assert one(llm).token_ids != before
    finally:
        llm.update_params(params)
    assert one(llm).token_ids == before
    stream = llm.stream(PROMPT)
    next(stream)
    with pytest.raises(RuntimeError, match="requests are running"):
        llm.update_params(params)
    stream.close()


def test_a_list_of_params_has_one_for_each_prompt(llm):
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        llm.generate([PROMPT, PROMPT], [SamplingParams()])


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(ValueError, match="temprature=0.5 is no sampling field; did you mean temperature?"):
        SamplingParams(temprature=0.5)
    with pytest.raises(ValueError, match="zzz=1 is no sampling field; the fields are n, best_of"):
        SamplingParams(zzz=1)


def test_a_bad_request_leaves_the_others_running(llm):
    stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    text = next(stream)
    for prompt in ({"prompt_token_ids": [5, None]}, {"prompt_token_ids": [True]}, {"prompt": "x", "image": 1}, {}):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(prompt, SamplingParams(repetition_penalty=1.1))
    assert text + "".join(stream) == one(llm, max_tokens=6).text


def test_a_stop_string_before_min_tokens_stays_in_the_text(llm):
    whole = one(llm, max_tokens=12)
    late = one(llm, max_tokens=12, min_tokens=12, stop=["Paris"])
    assert (late.text, late.finish_reason) == (whole.text, "length")


def test_what_a_request_leaves_in_its_pages_spoils_no_other(llm):
    expected = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * 4, SamplingParams(temperature=0.0))]
    params = llm.params
    try:
        llm.update_params(jax.tree.map(lambda leaf: leaf * jnp.nan, params))
        assert one(llm, "word " * 100).stop_reason == "the model's logits are not finite"
    finally:
        llm.update_params(params)
    outputs = llm.generate([PROMPT] * 4, SamplingParams(temperature=0.0))
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_doors_that_give_text_alone_raise_for_a_failed_request(llm):
    with pytest.raises(RequestError, match="no token is allowed"):
        list(llm.stream(PROMPT, SamplingParams(allowed_token_ids=[2], min_tokens=2)))
    with pytest.raises(ValueError, match="n=3: generate.. returns one text"):
        generate(PROMPT, n=3)


def test_calls_of_the_wrong_kind_are_refused(llm):
    with pytest.raises(ValueError, match="max_tokens=2: the chat template reads no such variable"):
        llm.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
    with pytest.raises(ValueError, match="several prompts need a list"):
        llm.score([PROMPT, PROMPT], "xy")
    assert len(llm.score("A", "B")[0].token_ids) == 1
    assert llm.get_tokenizer() is llm.tokenizer
