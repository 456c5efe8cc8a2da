"""The doors for researchers: a Flax module as the model, other dtypes of parameters and cache, settings by effect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ATTENTION_TILE_TOKENS, ModelConfig
from jaxinfer.engine.load import load_model
from jaxinfer.engine.open import default_sampling_fields
from jaxinfer.models.decoder import Decoder
from pallas_kernels.paged_attention import xla

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "models" / "golden"
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 9, "verbose": False}


@pytest.fixture(scope="module")
def loaded():
    return load_model(GOLDEN / "qwen3", "float32")


@pytest.fixture(scope="module")
def expected():
    return np.load(GOLDEN / "qwen3" / "expected.npz")


def prompts(expected):
    return [{"prompt_token_ids": row.tolist()} for row in expected["tokens"]]


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, return_logits=True)


def test_a_module_and_its_parameters_serve(loaded, expected):
    module = nnx.merge(loaded.graphdef, loaded.params)
    with LLM(module, max_model_len=64, **SMALL) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts(expected), GREEDY)]
        assert [choice.token_ids for choice in outputs] == expected["greedy"].tolist()
        np.testing.assert_allclose(outputs[0].logits, expected["greedy_logits"][0], atol=1e-4)
        assert {choice.text for choice in outputs} == {""}
        with pytest.raises(ValueError, match="came without a tokenizer: pass tokenizer="):
            llm.generate("text", GREEDY)
        with pytest.raises(ValueError, match="came without a tokenizer"):
            llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        assert str(llm) == "LLM(the module Decoder, float32, max_model_len=64)"


def test_a_structure_without_values_takes_params_as_a_pytree_or_nested_dict(loaded, expected):
    shapes = nnx.eval_shape(lambda: Decoder(loaded.config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="shapes and no values: pass params="):
        LLM(shapes, max_model_len=64, **SMALL)
    for params in (loaded.params, nnx.to_pure_dict(loaded.params)):
        with LLM(shapes, params=params, max_model_len=64, **SMALL) as llm:
            assert llm.generate(prompts(expected)[:1], GREEDY)[0].outputs[0].token_ids == expected["greedy"][0].tolist()


def test_a_module_of_ones_own_is_updated_like_any_other(loaded, expected):
    class Halved(Decoder):
        """The same model with smaller logits: a module that is no class of ours."""

        def logits(self, hidden):
            return super().logits(hidden) / 2

    module = Halved(loaded.config, rngs=nnx.Rngs(1))
    with LLM(module, max_model_len=64, **SMALL) as llm:
        llm.wait_until_compiled()
        compiled = llm.stats()["num_compiles"]
        assert llm.generate(prompts(expected), GREEDY)[0].outputs[0].token_ids != expected["greedy"][0].tolist()
        llm.update_params(loaded.params)
        choice = llm.generate(prompts(expected), GREEDY)[0].outputs[0]
        assert choice.token_ids == expected["greedy"][0].tolist()
        np.testing.assert_allclose(choice.logits, expected["greedy_logits"][0] / 2, atol=1e-4)
        assert llm.stats()["num_compiles"] == compiled


def test_what_is_no_model_is_refused(loaded):
    with pytest.raises(ValueError, match="no flax.nnx.Module with a `config`"):
        LLM(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), verbose=False)
    with pytest.raises(ValueError, match="params go with a Flax module"):
        LLM(str(GOLDEN / "qwen3"), params=loaded.params, verbose=False)
    with pytest.raises(ValueError, match="dtype='bfloat16': the module's parameters are float32"):
        LLM(nnx.merge(loaded.graphdef, loaded.params), dtype="bfloat16", verbose=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["qwen2", "llama31-rope"])
def test_half_precision_stays_near_float32(dtype, variant):
    """Rounding of 2^-8 (2^-11) a layer, against transformers in float32; logits here are of size 1."""
    expected = np.load(GOLDEN / variant / "expected.npz")
    module = load_model(GOLDEN / variant, dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(module.params)} == {dtype}
    with LLM(nnx.merge(module.graphdef, module.params), max_model_len=64, **SMALL) as llm:
        assert str(llm.engine.runner.cache.k.dtype) == dtype
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, return_logits=True)
        outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in expected["tokens"]], params)
        found = np.stack([output.outputs[0].logits[0] for output in outputs])
    error = np.abs(found - expected["greedy_logits"][:, 0]).max()
    scale = np.abs(expected["greedy_logits"][:, 0]).max()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.01) * scale


def test_the_caches_dtype_is_its_own(loaded, expected):
    module = nnx.merge(loaded.graphdef, loaded.params)
    with LLM(module, max_model_len=64, kv_cache_dtype="bfloat16", **SMALL) as llm:
        assert llm.engine.runner.cache.k.dtype == jnp.bfloat16
        logits = llm.generate(prompts(expected), GREEDY)[0].outputs[0].logits
    error = np.abs(logits[0] - expected["greedy_logits"][0, 0]).max()
    assert 0 < error < 0.05 * np.abs(expected["greedy_logits"]).max()


def test_without_batch_invariance_one_row_has_its_own_program(loaded, expected):
    module = nnx.merge(loaded.graphdef, loaded.params)
    with LLM(module, max_model_len=64, **SMALL) as llm:
        assert min(bucket.num_rows for bucket in llm.engine.runner.buckets) == 8
    with LLM(module, max_model_len=64, batch_invariant=False, **SMALL) as llm:
        assert min(bucket.num_rows for bucket in llm.engine.runner.buckets) == 1
        llm.wait_until_compiled()
        choice = llm.generate(prompts(expected)[0], GREEDY)[0].outputs[0]
    assert choice.token_ids == expected["greedy"][0].tolist()
    np.testing.assert_allclose(choice.logits, expected["greedy_logits"][0], atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("quantization", "int8"), ("tensor_parallel_size", 2), ("kv_cache_dtype", "int4"), ("page_size", 0),
        ("page_size", 48), ("num_pages", -1), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.5),
        ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_num_batched_tokens", 31), ("dtype", "int3"),
        ("seed", -1), ("num_pages", 1), ("num_pages", 10**15), ("max_model_len", True),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(loaded, setting, value):
    with pytest.raises(ValueError, match=f"{setting}={value!r}"):
        LLM(nnx.merge(loaded.graphdef, loaded.params), **{setting: value}, verbose=False)


def test_default_sampling_comes_from_the_models_generation_config(tmp_path, loaded):
    folder = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 5, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    assert load_model(folder, "float32").generation_config["top_k"] == 20
    native = shutil.copytree(ROOT / "checkpoints" / "tiny-llama", tmp_path / "native")
    (native / "generation_config.json").write_text(json.dumps(recommended))
    assert load_model(native, "float32").generation_config["top_k"] == 20
    fields = default_sampling_fields(recommended)
    assert SamplingParams(**fields) == SamplingParams(temperature=0.6, top_k=20, top_p=0.9, max_tokens=5)
    assert default_sampling_fields({"do_sample": False, "temperature": 1.0}) == {"temperature": 0.0}


def test_pages_fit_the_tile_of_attention():
    assert xla.KV_TILE_TOKENS == ATTENTION_TILE_TOKENS


def test_the_config_of_a_model_is_checked():
    with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        ModelConfig("llama", 8, 8, 8, 1, 3, 2, 8, 64)
