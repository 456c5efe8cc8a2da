"""Requests under a form, with a random model: what they write has it, with every other option, in any company."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputsParams
from jaxinfer.structured.grammar import _LIMITS, GrammarCompiler

MODEL = str(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama")
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 32, "verbose": False}
PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ")
PHONE = StructuredOutputsParams(regex=r"\d{3}-\d{4}")
WORDS = StructuredOutputsParams(regex="[a-z]+( [a-z]+){2,}")


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **SETTINGS) as llm:
        llm.wait_until_compiled()
        yield llm


def ask(llm: LLM, form: StructuredOutputsParams | None, prompt: str = PROMPT, **fields: Any):
    params = SamplingParams(structured_outputs=form, **{"seed": 1, "max_tokens": 100, **fields})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs


def one(llm: LLM, form: StructuredOutputsParams | None, **fields: Any):
    (choice,) = ask(llm, form, **fields)
    return choice


def token(llm: LLM, text: str) -> int:
    return llm.tokenizer.backend.token_to_id(text)


def test_every_choice_conforms(llm):
    choices = ask(llm, JSON, n=8)
    assert {choice.finish_reason for choice in choices} == {"stop"}
    for choice in choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert len({choice.text for choice in choices}) > 4
    best = ask(llm, JSON, n=2, best_of=8)
    ranked = sorted(choices, key=lambda choice: -choice.cumulative_logprob / len(choice.token_ids))
    assert [choice.text for choice in best] == [choice.text for choice in ranked[:2]]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (PHONE, r"\d{3}-\d{4}"),
        (StructuredOutputsParams(choice=["yes", "no", "yesterday"]), "yes|no|yesterday"),
        (StructuredOutputsParams(grammar='start: "a" ("b" | "c")+ "d"\n'), "a[bc]+d"),
        (StructuredOutputsParams(grammar='root ::= "a" ("b" | "c")+ "d"\n'), "a[bc]+d"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_every_form_is_kept_at_any_temperature(llm, form, pattern, temperature):
    for choice in ask(llm, form, n=4, temperature=temperature):
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.text)


def test_any_json_object_is_one(llm):
    choices = ask(llm, StructuredOutputsParams(json_object=True), n=4, max_tokens=100)
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(choice.text), dict) for choice in ended)


def test_it_ends_where_nothing_can_follow_without_another_step(llm):
    choice = one(llm, PHONE, ignore_eos=True)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert llm.tokenizer.decode(choice.token_ids) == choice.text  # no end of text was drawn
    exact = one(llm, PHONE, max_tokens=len(choice.token_ids))
    assert (exact.text, exact.finish_reason) == (choice.text, "stop")
    assert one(llm, PHONE, max_tokens=3).finish_reason == "length"


def test_an_ignored_end_is_drawn_only_where_nothing_else_is_left(llm):
    plain = one(llm, WORDS, logit_bias={2: 100.0})
    assert plain.finish_reason == "stop" and plain.token_ids[-1] == 2 and re.fullmatch("[a-z]+( [a-z]+){2}", plain.text)
    ignored = one(llm, WORDS, logit_bias={2: 100.0}, ignore_eos=True, max_tokens=40)
    assert ignored.finish_reason == "length" and not {0, 2} & set(ignored.token_ids)


def test_a_special_token_that_the_form_asks_for_ends_nothing_before_its_end(llm):
    form = StructuredOutputsParams(grammar='start: "a" <[2]> "b"\n')
    choice = one(llm, form)
    assert choice.token_ids == [token(llm, "a"), 2, token(llm, "b")] and choice.finish_reason == "stop"


def test_stop_conditions_end_it_early(llm):
    whole = one(llm, WORDS, ignore_eos=True, max_tokens=30)
    stopped = one(llm, WORDS, ignore_eos=True, max_tokens=30, stop=[" "])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " ")
    assert stopped.text == whole.text.partition(" ")[0]
    dash = token(llm, "-")
    choice = one(llm, PHONE, stop_token_ids=[dash])
    assert (choice.finish_reason, choice.stop_reason, choice.token_ids[-1]) == ("stop", dash, dash)


def test_min_tokens_keep_the_end_away(llm):
    ends = {0: 100.0, 2: 100.0}
    assert len(one(llm, WORDS, logit_bias=ends).token_ids) < 20
    choice = one(llm, WORDS, logit_bias=ends, min_tokens=25)
    assert choice.finish_reason == "stop" and len(choice.token_ids) >= 26 and re.fullmatch(WORDS.regex, choice.text)


def test_allowed_ids_and_bad_words_narrow_it(llm):
    ids = [token(llm, piece) for piece in ("1", "2", "-")]
    assert re.fullmatch("[12]{3}-[12]{4}", one(llm, PHONE, allowed_token_ids=ids).text)
    choices = ask(llm, PHONE, bad_words=["7", "2", "-4"], n=4)
    assert all(re.fullmatch(r"\d{3}-\d{4}", choice.text) for choice in choices)
    assert not any(word in choice.text for choice in choices for word in ("7", "2", "-4"))


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        (PHONE, {"min_tokens": 20}, "complete after .* tokens, and min_tokens=20 forbids to end there"),
        (
            StructuredOutputsParams(regex="a(b|c)?"),
            {"allowed_token_ids": ["a"]},
            "structured_outputs and allowed_token_ids together leave none after 1 tokens",
        ),
        (PHONE, {"bad_words": ["-"]}, "structured_outputs and bad_words together leave none after"),
        (
            StructuredOutputsParams(regex="a[bc]"),
            {"allowed_token_ids": ["a", "b"], "bad_words": ["b"]},
            "structured_outputs and allowed_token_ids and bad_words together leave none after 1 tokens",
        ),
    ],
)
def test_what_leaves_no_token_later_is_an_error_of_that_request(llm, form, fields, reason):
    if "allowed_token_ids" in fields:
        fields = {**fields, "allowed_token_ids": [token(llm, piece) for piece in fields["allowed_token_ids"]]}
    params = [SamplingParams(seed=1, structured_outputs=form, max_tokens=30, **fields), SamplingParams(seed=1)]
    failed, other = (output.outputs[0] for output in llm.generate([PROMPT] * 2, params, use_tqdm=False))
    assert failed.finish_reason == "error" and re.search(reason, str(failed.stop_reason))
    assert other.token_ids == one(llm, None, max_tokens=16).token_ids
    with pytest.raises(RequestError, match=reason):
        list(llm.stream(PROMPT, params[0]))


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        (
            PHONE,
            {"allowed_token_ids": [70, 71]},
            "structured_outputs and allowed_token_ids together leave none after",
        ),
        (PHONE, {"bad_words": list("0123456789")}, "structured_outputs and bad_words together leave none after"),
        (
            StructuredOutputsParams(regex="a{0}"),
            {"min_tokens": 1},
            "structured_outputs and min_tokens=1 together",
        ),
        (StructuredOutputsParams(regex="(a"), {}, "regex: invalid regular expression"),
        (StructuredOutputsParams(json={"not": {}}), {}, "'not' at # is not supported"),
    ],
)
def test_what_leaves_no_first_token_is_refused(llm, form, fields, reason):
    with pytest.raises(ValueError, match=reason):
        one(llm, form, **fields)
    assert not llm.engine.has_work


def test_logprobs_and_penalties_are_those_of_any_request(llm):
    choice = one(llm, PHONE, logprobs=3, prompt_logprobs=1, return_logits=True)
    logits = choice.logits.astype("float64")
    for row, (drawn, entry) in zip(logits, zip(choice.token_ids, choice.logprobs, strict=True), strict=True):
        expected = row - np.log(np.exp(row).sum())
        assert entry[drawn].logprob == pytest.approx(expected[drawn], abs=1e-4)  # of all tokens, before the mask
    favoured = one(llm, PHONE, temperature=0.0, logit_bias={token(llm, "5"): 50.0})
    assert favoured.text == "555-5555"
    penalised = one(
        llm, PHONE, temperature=0.0, logit_bias={token(llm, "5"): 4.0}, presence_penalty=2.0, frequency_penalty=2.0
    )
    assert penalised.text.count("5") < 7 and re.fullmatch(PHONE.regex, penalised.text)


def mixed() -> list[SamplingParams]:
    forms = [JSON, None, PHONE, None, WORDS, StructuredOutputsParams(choice=["a", "bc"]), None, JSON]
    return [
        SamplingParams(seed=place, max_tokens=40, structured_outputs=form, n=1 + place % 2, temperature=0.9)
        for place, form in enumerate(forms)
    ]


def shown(outputs) -> list[Any]:
    return [[(each.token_ids, each.text, each.finish_reason) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(llm):
    return shown(llm.generate(PROMPT + str(place), each, use_tqdm=False)[0] for place, each in enumerate(mixed()))


def prompts() -> list[str]:
    return [PROMPT + str(place) for place in range(len(mixed()))]


def test_neighbours_change_nothing_and_only_those_under_a_form_wait(llm, alone):
    compiles = llm.stats()["num_compiles"]
    assert shown(llm.generate(prompts(), mixed(), use_tqdm=False)) == alone
    assert llm.stats()["num_compiles"] == compiles
    for form, most in ((None, 21), (PHONE, 30)):
        params = SamplingParams(max_tokens=16, ignore_eos=True, structured_outputs=form)
        llm.engine.add("x", [1, 2, 3], params)
        steps = 0
        while llm.engine.has_work:
            llm.engine.step()
            steps += 1
        assert steps <= most


@pytest.mark.parametrize("settings", [{"overlap": False}, {"num_pages": 17, "page_size": 8, "max_model_len": 120}])
def test_overlap_and_preemption_change_nothing(alone, settings):
    with LLM(MODEL, **{**SETTINGS, **settings}) as other:
        assert shown(other.generate(prompts(), mixed(), use_tqdm=False)) == alone
        assert "num_pages" not in settings or other.stats()["num_preemptions"] > 0


def test_a_step_that_fails_is_repeated_and_changes_nothing(llm, alone, monkeypatch):
    run, calls = llm.engine.runner.run, []

    def failing(*arguments):
        calls.append(None)
        if len(calls) in (9, 30):
            raise RuntimeError("a step fails")
        return run(*arguments)

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    assert shown(llm.generate(prompts(), mixed(), use_tqdm=False)) == alone and len(calls) > 30


def test_a_form_that_grows_too_complex_ends_its_request(llm, monkeypatch):
    monkeypatch.setitem(_LIMITS, "max_items_in_row", 100)
    rules = "".join(f"a{n}: a{n - 1} a{n - 1}\n" for n in range(1, 21))
    form = StructuredOutputsParams(grammar=f'start: a20\na0: "a" | ""\n{rules}')
    failed = one(llm, form, max_tokens=30, ignore_eos=True)
    assert failed.finish_reason == "error" and "structured_outputs: " in str(failed.stop_reason)
    assert set(failed.text) == {"a"} and one(llm, PHONE).finish_reason == "stop"


def test_async_requests_compile_outside_the_engine_thread(monkeypatch):
    compiled, threads = GrammarCompiler._compile, []

    def watched(self, params):
        threads.append(threading.current_thread().name)
        return compiled(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", watched)

    async def main(llm: AsyncLLM):
        async def ask(form, **fields):
            last = None
            async for output in llm.generate(PROMPT, SamplingParams(structured_outputs=form, seed=1, **fields)):
                last = output
            return last

        good = await asyncio.gather(*(ask(PHONE, max_tokens=30) for _ in range(3)))
        texts = [output.outputs[0].text for output in good]
        assert re.fullmatch(PHONE.regex, texts[0]) and texts == texts[:1] * 3
        with pytest.raises(ValueError, match="invalid regular expression"):
            await ask(StructuredOutputsParams(regex="(a"))
        with pytest.raises(ValueError, match="together leave none"):
            await ask(PHONE, allowed_token_ids=[70])

    with_llm = AsyncLLM(MODEL, **SETTINGS)
    try:
        asyncio.run(asyncio.wait_for(main(with_llm), 60))
    finally:
        with_llm.close()
    assert threads and all(name.startswith("jaxinfer-encode") for name in threads)
