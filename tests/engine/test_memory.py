"""The memory plan: its arithmetic with made-up programs, its errors, and both against reality."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache.paged_kv import init_cache
from jaxinfer.checkpoint.reader import Checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine import memory, runner
from jaxinfer.engine.memory import Footprint, MemoryPlan, MemoryPlanError, device_memory, plan_memory

MODEL = ModelConfig("llama", 1000, 64, 128, 2, 4, 2, 16, max_position=4096)
WEIGHTS = 3_000_000
PAGE = 8192  # bytes: keys and values, 2 layers, 2 heads, 16 tokens, 16 wide, 4 bytes


def engine_config(length=4096, rows=8, tokens=256, num_pages=None, auto=False):
    cache, scheduler = CacheConfig(num_pages=num_pages), SchedulerConfig(length, rows, tokens)
    return EngineConfig(MODEL, cache, scheduler, fit_max_model_len=auto)


class Programs:
    """Programs whose temporaries grow with tokens and rows; remembers what was compiled."""

    def __init__(self, bytes_a_token):
        self.bytes_a_token = bytes_a_token
        self.compiled = []

    def measure(self, config):
        self.compiled.append(config)
        limits = config.scheduler
        temporaries = self.bytes_a_token * limits.max_num_batched_tokens + 8000 * limits.max_num_seqs
        return Footprint(temporaries, 5000 * (limits.max_num_seqs + 1))


def rest_of(config, programs):
    found = programs.measure(config)
    programs.compiled.pop()
    return WEIGHTS + found.temporaries_bytes + found.state_bytes


# Arithmetic


def test_page_bytes_are_the_caches():
    cache = init_cache(2, 5, 2, 16, 16, "float32")
    plan, _ = plan_memory(engine_config(), WEIGHTS, Programs(0).measure, available_bytes=None)
    assert plan.page_bytes == PAGE and cache.k.nbytes + cache.v.nbytes == 5 * PAGE


def test_where_memory_is_plenty_the_pool_holds_every_sequence_or_its_cap():
    for available in (None, 10**12):
        programs = Programs(100)
        plan, fitted = plan_memory(engine_config(), WEIGHTS, programs.measure, available_bytes=available)
        assert plan.num_pages == fitted.cache.num_pages == 8 * 256 + 1 and programs.compiled == [fitted]
        capped, _ = plan_memory(
            engine_config(), WEIGHTS, programs.measure, available_bytes=available, cache_cap_bytes=300 * PAGE
        )
        assert capped.num_pages == 301
        one, _ = plan_memory(
            engine_config(), WEIGHTS, programs.measure, available_bytes=available, cache_cap_bytes=PAGE
        )
        assert one.num_pages == 257, "one sequence must fit, cap or not"


def test_auto_is_the_models_limit_where_it_fits_and_else_what_does():
    programs = Programs(100)
    config = engine_config(auto=True)
    rest = rest_of(config, programs)
    plan, fitted = plan_memory(config, WEIGHTS, programs.measure, available_bytes=rest + 400 * PAGE)
    assert plan.max_model_len == 4096 and not fitted.fit_max_model_len
    plan, fitted = plan_memory(config, WEIGHTS, programs.measure, available_bytes=rest + 33 * PAGE)
    assert plan.max_model_len == fitted.scheduler.max_model_len == 32 * 16 and plan.num_pages == 33
    given = replace(config, cache=CacheConfig(num_pages=20))
    assert plan_memory(given, WEIGHTS, programs.measure, available_bytes=None)[0].max_model_len == 19 * 16


def test_programs_that_need_more_than_was_guessed_are_compiled_again_with_fewer_pages():
    for bytes_a_token in (20_000, 100):  # far above the guess, and far below: the guess then wastes memory
        programs = Programs(bytes_a_token)
        available = rest_of(engine_config(), programs) + 400 * PAGE
        plan, fitted = plan_memory(engine_config(), WEIGHTS, programs.measure, available_bytes=available)
        assert 1 < len(programs.compiled) <= 3 and programs.compiled[-1] == fitted
        assert plan.fits and 0.95 * 400 <= plan.num_pages <= 400


@given(
    pages=st.integers(-700, 5000),
    length=st.integers(2, 4096),
    rows=st.integers(1, 32),
    extra_tokens=st.integers(0, 500),
    num_pages=st.none() | st.integers(2, 3000),
    auto=st.booleans(),
    bytes_a_token=st.integers(0, 30_000),
    cap=st.none() | st.integers(0, 1000).map(lambda count: count * PAGE),
)
def test_a_plan_fits_or_its_error_names_settings_that_do(
    pages, length, rows, extra_tokens, num_pages, auto, bytes_a_token, cap
):
    programs = Programs(bytes_a_token)
    config = engine_config(length, rows, rows + extra_tokens, num_pages, auto)
    limits = {"available_bytes": max(0, rest_of(config, programs) + pages * PAGE), "cache_cap_bytes": cap}
    try:
        plan, fitted = plan_memory(config, WEIGHTS, programs.measure, **limits)
    except MemoryPlanError as error:
        assert str(plan_of(error)) in str(error)
        again = with_remedy(config, str(error))
        if again is not None:
            assert plan_memory(again, WEIGHTS, programs.measure, **limits)[0].fits
            assert again != config
        return
    assert plan.fits and plan.available_bytes == limits["available_bytes"]
    assert programs.compiled[-1] == fitted and len(programs.compiled) <= 3
    assert (fitted.cache.num_pages, fitted.scheduler.max_model_len) == (plan.num_pages, plan.max_model_len)
    assert fitted.scheduler.max_model_len == length or auto and 2 <= fitted.scheduler.max_model_len < length
    assert plan.num_pages == num_pages or num_pages is None and plan.num_pages > -(-plan.max_model_len // 16)


def plan_of(error):
    """The total that an error names must be the sum of its parts, to its rounding."""
    sizes = re.findall(r"([\d.]+) (GB|MB|kB|B)\b", str(error))
    *parts, total, _ = [float(number) * {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1}[unit] for number, unit in sizes]
    assert len(parts) == 4 and abs(sum(parts) - total) < 0.03 * total + 1e3
    return "not enough memory: weights 3.0 MB"


def with_remedy(config, message):
    """The configuration that an error recommends; None where it recommends another model."""
    found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", message.partition("); ")[2])}
    if not found:
        assert "smaller model" in message
        return None
    cache = replace(config.cache, num_pages=found.pop("num_pages", config.cache.num_pages))
    return replace(config, cache=cache, scheduler=replace(config.scheduler, **found))


def test_the_nearest_length_is_the_last_that_fits():
    programs = Programs(100)
    available = rest_of(engine_config(), programs) + 101 * PAGE + 5
    with pytest.raises(MemoryPlanError, match=r"one sequence of max_model_len=4096 .*; max_model_len=1600 fits"):
        plan_memory(engine_config(), WEIGHTS, programs.measure, available_bytes=available)
    plan_memory(engine_config(1600), WEIGHTS, programs.measure, available_bytes=available)
    with pytest.raises(MemoryPlanError):
        plan_memory(engine_config(1601), WEIGHTS, programs.measure, available_bytes=available)


def test_every_kind_of_remedy():
    def refused(available, **settings):
        with pytest.raises(MemoryPlanError) as caught:
            plan_memory(engine_config(**settings), WEIGHTS, Programs(20_000).measure, available_bytes=available)
        return str(caught.value).partition("); ")[2]

    rest = rest_of(engine_config(), Programs(20_000))
    assert refused(rest + 9 * PAGE, num_pages=10) == "num_pages=9 fits"
    assert refused(rest) == "max_num_seqs=8, max_num_batched_tokens=128 fit"
    assert refused(rest - 2_000_000, auto=True) == "max_num_seqs=8, max_num_batched_tokens=128 fit"
    half = rest_of(engine_config(tokens=128), Programs(20_000))
    assert refused(half + 3 * PAGE) == "max_num_seqs=8, max_num_batched_tokens=128 fit with max_model_len=32"
    least = rest_of(engine_config(tokens=32, rows=1), Programs(20_000))
    assert refused(least + 2 * PAGE, length=16) == "max_num_seqs=1, max_num_batched_tokens=32 fit"
    assert refused(WEIGHTS) == "dtype='bfloat16' halves the weights; else take a smaller model, or free memory"
    assert refused(100) == "take a smaller model, or free memory"


def test_a_plan_prints_as_a_table():
    plan = MemoryPlan(538_000_000, 52_900_000, 8_100, 8192, 16, 257, 2048, 10**10)
    lines = str(plan).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "weights", "step temporaries", "sampler state", "cache", "total", "available",
    ]  # fmt: skip
    assert "4,096 tokens, 2.0 times max_model_len" in lines[3] and lines[5].endswith("10.00 GB")
    assert "available" not in str(replace(plan, available_bytes=None))


# The device


def test_an_accelerators_memory_is_its_share_less_what_is_in_use(monkeypatch):
    class Device:
        stats = {"bytes_limit": 1000, "bytes_in_use": 300}

        def memory_stats(self):
            return self.stats

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert device_memory(0.9) == 600 and device_memory(0.2) == 0
    for unknown in (None, {}):
        monkeypatch.setattr(Device, "stats", unknown)
        assert device_memory(0.9) is None


def test_a_cpus_memory_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1000)
    assert device_memory(0.5) == 500
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    assert device_memory(0.5) is None


# The engine

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "dtype": "float32", "verbose": True}


@pytest.fixture
def limit(monkeypatch):
    def set_limit(available_bytes):
        monkeypatch.setattr(memory, "device_memory", lambda utilization: available_bytes)

    return set_limit


def test_too_little_memory_is_an_error_before_a_weight_is_read(tiny_model_path, limit, monkeypatch):
    def read(*args):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    limit(100_000)
    with pytest.raises(MemoryPlanError, match=r"weights 180.8 kB .* 100.0 kB may be used.*smaller model"):
        LLM(str(tiny_model_path), **SETTINGS)


def test_auto_takes_the_longest_that_fits_and_says_so(tiny_model_path, limit, capsys):
    with LLM(str(tiny_model_path), max_model_len="auto", **SETTINGS) as llm:
        plan = llm.memory_plan
    assert plan.max_model_len == 256 and "max_model_len" not in capsys.readouterr().err
    limit(plan.total_bytes - plan.cache_bytes + 10 * plan.page_bytes)
    with pytest.raises(MemoryPlanError, match="max_model_len=144 fits"):
        LLM(str(tiny_model_path), **SETTINGS)
    with LLM(str(tiny_model_path), max_model_len="auto", **SETTINGS) as llm:
        assert "max_model_len=144 fits the memory; the model's limit is 256" in capsys.readouterr().err
        assert repr(llm).endswith("max_model_len=144)") and llm.stats()["pages_total"] == 9
        prompt = {"prompt_token_ids": [5] * 100}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 44


def test_what_the_plan_compiled_is_what_runs(tiny_model_path, monkeypatch):
    compiled = []

    def counting(*args, **kwargs):
        compiled.append(args)
        return original(*args, **kwargs)

    original = runner.compile_layerwise
    monkeypatch.setattr(runner, "compile_layerwise", counting)
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        llm.wait_until_compiled()
        assert len(compiled) == len(llm.engine.runner.buckets)
        assert llm.stats()["num_compiles"] == len(compiled) + 3  # sampling, scoring, copies


# Reality

HELD = """
import ctypes, gc, json, sys
from pathlib import Path
import jax
import jax.numpy as jnp
from flax import nnx
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig
from jaxinfer.models.decoder import Decoder

def status_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def trim():
    # What the compiler has freed would else stay with the process.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

model, settings, prompt_tokens = json.loads(sys.argv[1])
if isinstance(model, dict):
    model = Decoder(ModelConfig(**model), rngs=nnx.Rngs(0))
llm = LLM(model, verbose=False, **settings)
plan = llm.memory_plan
cache = llm.engine.runner.cache
# All of it resident, as a full one is: an empty one is untouched.
llm.engine.runner.cache = cache = jax.tree.map(jnp.ones_like, cache)
jax.block_until_ready(cache)
del cache
params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True, repetition_penalty=1.1, logprobs=5,
    prompt_logprobs=1)
prompts = [{"prompt_token_ids": [7 + i] * prompt_tokens} for i in range(settings["max_num_seqs"])]
trim()
Path("/proc/self/clear_refs").write_text("5")
llm.generate(prompts, params, use_tqdm=False)
peak = status_bytes("VmHWM")
llm.close()
trim()
print(json.dumps({"held": peak - status_bytes("VmRSS"), "total": plan.total_bytes, "weights": plan.weights_bytes,
    "cache": plan.cache_bytes, "temporaries": plan.temporaries_bytes, "state": plan.state_bytes}))
"""


def held_by(model, settings, prompt_tokens):
    arguments = json.dumps([model, settings, prompt_tokens])
    done = subprocess.run(
        [sys.executable, "-c", HELD, arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WIDE = {
    "architecture": "llama", "vocab_size": 300_000, "embed_dim": 16, "ffn_dim": 32, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 8, "max_position": 4096, "tie_embeddings": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured through /proc")
def test_a_process_holds_what_the_plan_says():
    """A module of one's own, whose parameters stay when the engine lets go of the rest."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128, "num_pages": 200_000}
    found = held_by(WIDE, settings, prompt_tokens=20)
    planned = found["total"] - found["weights"]
    assert found["temporaries"] > 120e6, "the temporaries would be lost in the cache"
    # With jax 0.10 the head over prompt positions takes scratch that no analysis shows: up to 180 MB were measured,
    # two to three times its logits. A second copy of the cache would still be over the limit.
    unseen = 0.6 * found["cache"] if jax.__version_info__ < (0, 12) else 0.25 * planned
    assert 0.8 * planned < found["held"] < planned + unseen, found


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured through /proc")
def test_the_default_model_holds_what_the_plan_says(smollm2_path):
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 512}
    found = held_by(str(smollm2_path), settings, prompt_tokens=60)
    # jax 0.10 holds scratch beside what its programs report, as above.
    most = 1.15 if jax.__version_info__ >= (0, 12) else 1.4
    assert 0.9 * found["total"] < found["held"] < most * found["total"], found
