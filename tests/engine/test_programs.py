"""Compiling behind the first requests: who waits, who does not, and what is left when it is abandoned."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.programs import BackgroundCompiler, Compiler, ProgramTable

ROOT = Path(__file__).parents[2]
SETTINGS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, "verbose": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def ended(background: BackgroundCompiler) -> bool:
    background._thread.join(5)
    return not background.is_alive


def test_a_table_makes_each_program_once_for_all_threads():
    made, entered = [], threading.Barrier(4)

    def make(key):
        made.append(key)
        time.sleep(0.05)
        return f"program {key}"

    table: ProgramTable[int] = ProgramTable(make)
    results = []

    def use():
        entered.wait(5)
        results.append([table[key] for key in (1, 2, 1)])

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [1, 2] and results == [["program 1", "program 2", "program 1"]] * 4
    assert 1 in table and 3 not in table


def test_a_program_that_cannot_be_made_is_tried_again():
    failures = [ValueError("no"), None]

    def make(key):
        if error := failures.pop(0):
            raise error
        return key

    table: ProgramTable[int] = ProgramTable(make)
    with pytest.raises(ValueError, match="no"):
        table[7]
    assert 7 not in table and table[7] == 7


def test_jobs_run_in_order_and_are_waited_for():
    done = []
    background = BackgroundCompiler([lambda index=index: done.append(index) for index in range(5)])
    background.wait(5)
    assert done == list(range(5)) and not background.is_alive
    background.wait()


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1, True])
def test_a_wait_of_no_seconds_is_refused_and_the_jobs_go_on(timeout_s):
    release = threading.Event()
    background = BackgroundCompiler([lambda: release.wait(10)])
    with pytest.raises(ValueError, match="timeout_s"):
        background.wait(timeout_s)
    assert background.is_alive
    release.set()
    background.wait(5)


def test_an_interrupted_wait_leaves_the_jobs_running():
    """`Thread.join` would mark the thread as ended, so that the process would not wait for it at its exit."""
    release = threading.Event()
    background = BackgroundCompiler([lambda: release.wait(10)])
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            background.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert background.is_alive
    release.set()
    background.wait(5)


def test_stop_begins_no_further_job_and_waits_for_none():
    release, begun, done = threading.Event(), threading.Event(), []

    def blocked():
        begun.set()
        release.wait(10)

    background = BackgroundCompiler([blocked, lambda: done.append(1)])
    assert begun.wait(5)
    with pytest.raises(TimeoutError, match=r"after 0\.01 s"):
        background.wait(0.01)
    start_s = time.monotonic()
    background.stop()
    assert time.monotonic() - start_s < 0.5 and background.is_alive
    release.set()
    assert ended(background) and done == []
    with pytest.raises(RuntimeError, match="closed"):
        background.wait()


def test_an_error_is_logged_and_raised_to_who_waits(caplog):
    def fail():
        raise MemoryError("no more")

    background = BackgroundCompiler([fail])
    with pytest.raises(RuntimeError, match="in the background failed: no more") as caught:
        background.wait(5)
    assert isinstance(caught.value.__cause__, MemoryError)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "steps go on in the shapes that there are" in record.getMessage() and record.exc_info


@pytest.fixture
def hold(monkeypatch):
    """Lets the first three programs of an LLM be made and holds the others until it is set."""
    release, get, count = threading.Event(), Compiler.get, iter(range(100))

    def held(self, *given):
        if next(count) >= 3:
            release.wait(20)
        return get(self, *given)

    monkeypatch.setattr(Compiler, "get", held)
    yield release
    release.set()


def test_requests_are_served_before_the_rest_is_compiled(tiny_model_path, hold):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        first = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
        stats = llm.stats()
        assert stats["num_compiles"] == 3 and stats["compile_time_s"] > 0
        assert stats["padding_waste"] == pytest.approx(1 - 8 / (4 * 32))  # 5 + 1 + 1 + 1 tokens, each in 32
        hold.set()
        llm.wait_until_compiled(60)
        assert llm.stats()["num_compiles"] == 5
        assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == first
        assert llm.stats()["num_compiles"] == 5
        assert llm.stats()["padding_waste"] < stats["padding_waste"]


@pytest.mark.parametrize("how", ["close", "del"])
def test_leaving_abandons_the_rest_and_frees_the_engine(tiny_model_path, hold, how):
    llm = LLM(str(tiny_model_path), **SETTINGS)
    engine, background = weakref.ref(llm.engine), llm.engine._background
    array = weakref.ref(llm.engine.runner.cache.k)
    if how == "close":
        llm.close()
    del llm
    gc.collect()
    assert engine() is None and array() is None
    assert background.is_alive, "it was waited for"
    hold.set()
    assert ended(background)


def test_steps_go_on_where_a_shape_cannot_be_compiled(tiny_model_path, monkeypatch, caplog):
    get = Compiler.get

    def fail(self, name, *given):
        if "decode" in name:
            raise MemoryError("no more")
        return get(self, name, *given)

    monkeypatch.setattr(Compiler, "get", fail)
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        with pytest.raises(RuntimeError, match="no more"):
            llm.wait_until_compiled(60)
        assert llm.generate("hello", GREEDY)[0].finished
        assert "could not be compiled in the background" in caplog.text


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise KeyboardInterrupt", -2)])
def test_a_process_may_end_while_a_program_is_compiled(end, code):
    """A thread that comes back from XLA while the interpreter goes down would abort the process."""
    script = f"""
import jax, jax.numpy as jnp
from jaxinfer.engine.programs import BackgroundCompiler
def function(x):
    for axis in 60 * [0, 1]:
        x = jnp.sin(x @ x) + jnp.cumsum(x, axis=axis) * jnp.exp(x)
    return x
lowered = jax.jit(function).lower(jnp.ones((64, 64)))
background = BackgroundCompiler(100 * [lowered.compile])
assert background.is_alive
{end}
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == code, run.stderr
    assert "FATAL" not in run.stderr and "terminate" not in run.stderr
