"""A fork of a process that uses JAX gets an error in every door, at once; a spawned process has an LLM of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, "dtype": "float32", "verbose": False}
HEAD = f"""
import asyncio, multiprocessing, os, sys, warnings
from jaxinfer import LLM, AsyncLLM, EngineDeadError, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SETTINGS = {SETTINGS!r}


def tokens(llm):
    return llm.generate("abc", PARAMS)[0].outputs[0].token_ids
"""
FORK = """
async def read(llm):
    async for output in llm.generate("abc", PARAMS):
        pass
    return output.outputs[0].token_ids


def in_child():
    tries = {
        "generate": lambda: tokens(llm),
        "stream": lambda: list(llm.stream("abc", PARAMS)),
        "AsyncLLM.generate": lambda: asyncio.run(read(other)),
        "AsyncLLM.abort": lambda: asyncio.run(other.abort("x")),
        "AsyncLLM.stats": other.stats,
        "update_params": lambda: llm.update_params({}),
        "LLM": lambda: LLM(sys.argv[1], **SETTINGS),
        "AsyncLLM": lambda: AsyncLLM(sys.argv[1], **SETTINGS),
    }
    for name, use in tries.items():
        try:
            use()
        except EngineDeadError as error:
            assert "forked" in str(error) and "spawn" in str(error)
            print(name, flush=True)
    other.close()
    llm.close()
    print("closed", flush=True)


llm, other = LLM(sys.argv[1], **SETTINGS), AsyncLLM(sys.argv[1], **SETTINGS)
before = tokens(llm)
warnings.simplefilter("ignore")  # jax's own, which says that this can hang
child = os.fork()
if not child:
    in_child()
    os._exit(0)  # as multiprocessing has it: taking JAX down crashes in a fork
assert os.waitpid(child, 0)[1] == 0
assert tokens(llm) == asyncio.run(read(other)) == before
other.close()
print("parent")
"""
SPAWN = """
def in_child(path):
    with LLM(path, **SETTINGS) as llm:
        return tokens(llm)


if __name__ == "__main__":
    with LLM(sys.argv[1], **SETTINGS) as llm, multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_child, [sys.argv[1]]) == tokens(llm)
    print("equal")
"""
EARLY = """
# What has imported the package and made no engine yet may fork.
child = os.fork()
if not child:
    with LLM(sys.argv[1], **SETTINGS) as llm:
        print(len(tokens(llm)), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def run(folder, model_path, code):
    script = folder / "script.py"
    script.write_text(HEAD + code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(model_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_is_told_and_its_parent_goes_on(tmp_path, tiny_model_path):
    calls = ["generate", "stream", "AsyncLLM.generate", "AsyncLLM.abort", "AsyncLLM.stats", "update_params"]
    assert run(tmp_path, tiny_model_path, FORK) == [*calls, "LLM", "AsyncLLM", "closed", "parent"]


@pytest.mark.full
def test_a_spawned_process_has_an_llm_of_its_own(tmp_path, tiny_model_path):
    assert run(tmp_path, tiny_model_path, SPAWN) == ["equal"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_before_the_first_engine_works(tmp_path, tiny_model_path):
    assert run(tmp_path, tiny_model_path, EARLY) == ["8"]
