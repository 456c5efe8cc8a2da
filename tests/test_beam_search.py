"""Beam search: against a plain one over logits computed from scratch, what it computes, and what it refuses."""

from __future__ import annotations

import itertools
import math
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import LLM, BeamSearchParams, CompletionOutput, Logprob, SamplingParams
from jaxinfer.beam_search import _Search

SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "dtype": "float32",
    "verbose": False,
}
PROMPTS = ["hello there, this is longer", "abc", "1 2 3 4"]
EOS = 2


@pytest.fixture(scope="module")
def llm(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.scheduler.check_integrity()
        assert (llm.stats()["pages_used"], llm.engine.has_work, llm._inboxes) == (0, False, {})


@pytest.fixture(scope="module")
def logprobs(llm):
    """log softmax(logits / temperature) [V] after a prefix of token ids, each computed whole and alone, float64."""
    known = {}

    def of(ids, temperature=1.0):
        if tuple(ids) not in known:
            params = SamplingParams(max_tokens=0, return_hidden_states=True)
            output = llm.generate({"prompt_token_ids": list(ids)}, params)[0]
            hidden = jnp.asarray(output.prompt_hidden_states[-1:])
            known[tuple(ids)] = np.asarray(llm.engine.runner.logits_of(hidden))[0].astype(np.float64)
        logits = known[tuple(ids)] / temperature
        return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()

    return of


def reference(logprobs, prompt, width, max_tokens, length_penalty=1.0, eos=(EOS,), **options):
    """Beam search as it is written in textbooks: max_tokens steps over all of the vocabulary, nothing left out."""
    beams, ended = [(0.0, tuple(prompt))], []
    for _ in range(max_tokens):
        grown = []
        for total, ids in beams:
            row = logprobs(ids, **options)
            likeliest = sorted(range(len(row)), key=lambda token: -row[token])[: 2 * width]  # noqa: B023
            grown += [(total + row[token], (*ids, token)) for token in likeliest]
        ended += [beam for beam in grown if beam[1][-1] in eos]
        beams = sorted((beam for beam in grown if beam[1][-1] not in eos), reverse=True)[:width]
    ended += beams

    def score(beam):
        return beam[0] / (len(beam[1]) - (beam[1][-1] in eos)) ** length_penalty

    return sorted(ended, key=score, reverse=True)[:width]


def check(output, expected, prompt, eos=(EOS,)):
    assert [beam.tokens for beam in output.sequences] == [list(ids) for _, ids in expected]
    for beam, (total, ids) in zip(output.sequences, expected, strict=True):
        assert abs(beam.cum_logprob - total) < 1e-4
        assert beam.finish_reason == ("stop" if ids[-1] in eos else "length")
        new = beam.tokens[len(prompt) :]
        entries = zip(new, beam.logprobs, strict=True)
        assert math.isclose(sum(entry[token].logprob for token, entry in entries), beam.cum_logprob)


@pytest.mark.parametrize("width,max_tokens", [(1, 6), (2, 5), (4, 4), (10, 3)])
def test_beams_are_those_of_a_plain_search(llm, logprobs, width, max_tokens):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(width, max_tokens))
    for text, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.tokenizer.encode(text)
        check(output, reference(logprobs, ids, width, max_tokens), ids)
        assert all(beam.text.startswith(text) for beam in output.sequences)


@pytest.fixture
def early_ends(llm, monkeypatch):
    """Common tokens end a text, so that beams end at many lengths."""
    ends = (EOS, *range(20, 60))
    monkeypatch.setattr(type(llm.tokenizer), "eos_token_ids", property(lambda self: ends))
    return ends


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 4])
def test_beams_that_end_compete_by_score(llm, logprobs, early_ends, length_penalty):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(3, 5, length_penalty=length_penalty))
    lengths = set()
    for text, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.tokenizer.encode(text)
        check(output, reference(logprobs, ids, 3, 5, length_penalty, early_ends), ids, early_ends)
        lengths |= {(len(beam.tokens) - len(ids), beam.finish_reason) for beam in output.sequences}
    assert len(lengths) > 1 or length_penalty == 0


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 10),
    st.sampled_from([-2.0, -0.5, 0.0, 1.0, 4.0]),
    st.floats(0.1, 10),
)
@settings(max_examples=200)
def test_ending_early_changes_nothing(seed, width, max_tokens, length_penalty, spread):
    """Made-up models of six tokens, the last of which ends a text."""

    def model(ids):
        logits = np.random.default_rng([seed, *ids]).normal(0, spread, 6)
        return logits - np.log(np.sum(np.exp(logits)))

    def step(tokens):
        row = model(tokens)
        likeliest = np.argsort(-row)[: 2 * width].tolist()
        entry = {token: Logprob(float(row[token]), rank + 1, "") for rank, token in enumerate(likeliest)}
        return CompletionOutput(0, "", likeliest[:1], [entry], "length")

    params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty)
    search = _Search([0], params, frozenset([5]), 1 + max_tokens)
    while search.beams:
        search.take([step(beam.tokens) for beam in search.beams])
    expected = reference(model, [0], width, max_tokens, length_penalty, (5,))
    assert [beam.tokens for beam in search.ended] == [list(ids) for _, ids in expected]


def test_a_search_ends_where_nothing_can_change_any_more(llm, early_ends):
    before = llm.stats()["num_computed_tokens"]
    llm.beam_search("some new prompt", BeamSearchParams(2, 40, length_penalty=0.0))
    assert llm.stats()["num_computed_tokens"] - before < 40


def test_a_wide_search_of_two_tokens_finds_the_best_of_all(llm, logprobs):
    """Every pair of tokens by brute force; the best ones begin with a likely token."""
    ids = llm.tokenizer.encode("abc")
    first = logprobs(ids)
    pairs = []
    for token in np.argsort(-first)[:10].tolist():
        row = logprobs((*ids, token))
        pairs += [(first[token] + row[other], [*ids, token, other]) for other in range(len(row))]
    best = max(pairs)
    assert sorted(first)[-11] < best[0], "a token that the search drops might lead to the best pair"
    found = llm.beam_search("abc", BeamSearchParams(10, 2, ignore_eos=True))[0].sequences[0]
    assert found.tokens == best[1] and abs(found.cum_logprob - best[0]) < 1e-4


def test_one_beam_is_greedy(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        (beam,) = llm.beam_search(prompt, BeamSearchParams(1, 12, ignore_eos=True))[0].sequences
        assert beam.tokens == output.prompt_token_ids + output.outputs[0].token_ids
        assert math.isclose(beam.cum_logprob, output.outputs[0].cumulative_logprob, rel_tol=1e-6)


def test_temperature_scales_the_logits(llm, logprobs):
    ids = llm.tokenizer.encode("abc")
    for temperature in (0.3, 3.0):
        (output,) = llm.beam_search("abc", BeamSearchParams(3, 4, temperature=temperature))
        check(output, reference(logprobs, ids, 3, 4, temperature=temperature), ids)
    plain, one = (llm.beam_search("abc", BeamSearchParams(3, 4, temperature=each)) for each in (0, 1))
    assert plain == one


def test_each_step_computes_one_token_a_beam(llm, monkeypatch):
    num_computed, run = [], llm._run

    def counted(*arguments):
        before = llm.stats()["num_computed_tokens"]
        outputs = run(*arguments)
        num_computed.append(llm.stats()["num_computed_tokens"] - before)
        return outputs

    monkeypatch.setattr(llm, "_run", counted)
    ids = [*range(10, 39)]
    llm.beam_search({"prompt_token_ids": ids}, BeamSearchParams(4, 20, ignore_eos=True))
    assert num_computed == [len(ids)] + [4] * 19


def test_without_a_prefix_cache_the_beams_are_the_same(llm, tiny_model_path):
    params = BeamSearchParams(4, 8)
    with LLM(str(tiny_model_path), **SETTINGS, enable_prefix_caching=False) as other:
        expected = other.beam_search(PROMPTS, params)
    assert llm.beam_search(PROMPTS, params) == expected
    with LLM(str(tiny_model_path), **SETTINGS, num_pages=8) as small:
        assert small.beam_search(PROMPTS, params) == expected
        most = sum(len(small.tokenizer.encode(prompt)) + 4 * 7 for prompt in PROMPTS)
        assert small.stats()["num_computed_tokens"] > most, "no beam lost its pages to another"
        small.engine.scheduler.check_integrity()
        with pytest.raises(ValueError, match="lower max_tokens"):
            small.beam_search({"prompt_token_ids": [5] * 30}, BeamSearchParams(2, 34))


def test_salts_keep_prompts_apart(llm):
    ids = [*range(40, 70)]
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in "ab"]
    before = llm.stats()["num_computed_tokens"]
    one, other = llm.beam_search(prompts, BeamSearchParams(1, 1))
    assert one == other and llm.stats()["num_computed_tokens"] - before == 2 * len(ids)


def test_the_end_of_text_in_text_and_tokens(llm, early_ends):
    hidden, shown = (
        llm.beam_search("abc", BeamSearchParams(3, 5, length_penalty=0.0, include_stop_str_in_output=shown))[0]
        for shown in (False, True)
    )
    assert any(beam.finish_reason == "stop" for beam in hidden.sequences)
    for one, other in zip(hidden.sequences, shown.sequences, strict=True):
        assert one.tokens == other.tokens and other.text == llm.tokenizer.decode(other.tokens)
        ended = one.finish_reason == "stop"
        assert one.text == llm.tokenizer.decode(one.tokens[:-1] if ended else one.tokens)


def test_the_models_limit_ends_beams(llm):
    ids = [*range(10, 70)]
    beams = llm.beam_search({"prompt_token_ids": ids}, BeamSearchParams(2, 50, ignore_eos=True))[0].sequences
    assert [(len(beam.tokens), beam.finish_reason) for beam in beams] == [(64, "length")] * 2


def test_bad_values_are_refused_by_name(llm):
    for name, value in (
        *itertools.product(["beam_width"], [0, 11, 1.5, True, "2"]),
        *itertools.product(["max_tokens"], [0, -1, None, 2.0]),
        *itertools.product(["temperature"], [-1, math.nan, None]),
        *itertools.product(["length_penalty"], [11, math.nan, "1"]),
        *itertools.product(["ignore_eos", "include_stop_str_in_output"], [1, None]),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})
    with pytest.raises(TypeError, match="top_p"):
        BeamSearchParams(2, 2, top_p=0.5)
    with pytest.raises(ValueError, match="from 1 up to 10"):
        BeamSearchParams(11, 2)
    with pytest.raises(TypeError, match="BeamSearchParams"):
        llm.beam_search("abc", SamplingParams())
    for prompt, message in (("", "prompt is empty"), ({"text": "x"}, "a prompt needs")):
        with pytest.raises(ValueError, match=message):
            llm.beam_search(["abc", prompt], BeamSearchParams(2, 2))
    with pytest.raises(ValueError, match="max_model_len=64"):
        llm.beam_search({"prompt_token_ids": [5] * 64}, BeamSearchParams(2, 2))
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []


def test_an_interrupt_ends_the_search_and_leaves_the_engine_idle(llm, monkeypatch):
    expected, step, calls = llm.beam_search("abc", BeamSearchParams(3, 6)), llm.engine.step, itertools.count()

    def interrupted():
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search("abc", BeamSearchParams(3, 6))
    assert not llm.engine.has_work and next(calls) < 10
    monkeypatch.undo()
    assert llm.beam_search("abc", BeamSearchParams(3, 6)) == expected


def test_a_beam_whose_request_fails_ends_alone(llm, monkeypatch):
    """The failed ones come last, with the reason; other prompts do not change."""
    expected, run, calls = llm.beam_search(PROMPTS, BeamSearchParams(2, 4)), llm._run, itertools.count()

    def failing(*arguments):
        outputs = run(*arguments)
        if next(calls) == 2:
            outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason = "error", "broken"
        return outputs

    monkeypatch.setattr(llm, "_run", failing)
    found = llm.beam_search(PROMPTS, BeamSearchParams(2, 4))
    assert found[1:] == expected[1:]
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert all(beam.finish_reason == "length" and len(beam.tokens) == len(ids) + 4 for beam in found[0].sequences)

    def all_failing(*arguments):
        outputs = run(*arguments)
        for output in outputs:
            output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", "broken"
        return outputs

    monkeypatch.setattr(llm, "_run", all_failing)
    (beam,) = llm.beam_search("abc", BeamSearchParams(2, 4))[0].sequences
    assert (beam.finish_reason, beam.stop_reason, beam.text) == ("error", "broken", "abc")
