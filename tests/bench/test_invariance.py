"""The promise that a request's output depends on nothing beside it, on the tiny model; and that the check can fail."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.invariance import check_invariance

SETTINGS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256, "verbose": False}


@pytest.mark.slow
def test_every_circumstance_gives_the_same_bits(tiny_model_path):
    found = check_invariance(lambda **changed: LLM(str(tiny_model_path), **{**SETTINGS, **changed}))
    assert [each.name for each in found if not each.same] == []
    assert all(each.evidence > 0 for each in found), found
    assert len(found) == 10


def test_where_shapes_have_their_own_bits_every_step_has_one_shape(tiny_model_path, monkeypatch):
    prompts, params = ["hello", "a longer prompt"], SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    monkeypatch.setattr("jaxinfer.engine.assemble.rows_keep_their_bits", lambda: False)
    with LLM(str(tiny_model_path), batch_invariant=True, **SETTINGS) as llm:
        assert len(llm.engine.runner.buckets) == 1
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    with LLM(str(tiny_model_path), batch_invariant=False, **SETTINGS) as llm:
        assert len(llm.engine.runner.buckets) > 1


@pytest.mark.full
def test_every_circumstance_gives_the_same_bits_on_the_default_model(smollm2_path):
    def make(**changed):
        return LLM(str(smollm2_path), **{**SETTINGS, "max_model_len": 256, **changed})

    found = check_invariance(make, num_prompt_tokens=150, num_output_tokens=24)
    assert all(each.same and each.evidence for each in found), found


def test_a_difference_is_seen(tiny_model_path, monkeypatch):
    from jaxinfer.engine.sampler import Sampler

    calls = []

    def key_of(self, seed, arrival):
        calls.append(seed)
        return key_of_before(self, None if seed is None else seed + len(calls), arrival)

    key_of_before = Sampler.key_of
    monkeypatch.setattr(Sampler, "key_of", key_of)
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        found = check_invariance(lambda **_: nullcontext(llm))
    assert not any(each.same for each in found)
