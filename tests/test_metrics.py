"""What the engine measures of its requests, against what the requests say of themselves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import LLM, SamplingParams
from jaxinfer.metrics import EngineMetrics, Histogram, one_two_five

SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 16,
    "dtype": "float32",
    "verbose": False,
}


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def shared_llm(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    shared_llm.engine.metrics = EngineMetrics(SETTINGS["max_model_len"])
    return shared_llm


@given(
    st.lists(st.floats(0, 100), unique=True, min_size=1, max_size=8).map(sorted),
    st.lists(st.floats(0, 120), max_size=30),
)
def test_a_histogram_counts_as_numpy_does(bounds: list[float], values: list[float]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    read = histogram.read()
    expected = [int(np.sum(np.asarray(values) <= bound)) for bound in bounds] + [len(values)]
    assert list(read.cumulative) == expected and read.num == len(values)
    assert read.sum == pytest.approx(sum(values))


def test_bounds_of_lengths() -> None:
    assert one_two_five(300) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert one_two_five(1) == (1,)


def test_requests_are_measured(llm) -> None:
    outputs = llm.generate(["hello", "hello there", "x"], greedy())
    found = llm.engine.metrics.snapshot()
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert found.prompt_tokens == sum(lengths)
    assert found.cached_prompt_tokens == sum(output.num_cached_tokens for output in outputs)
    assert found.generation_tokens == 3 * 6
    assert {reason: num for reason, num in found.finished.items() if num} == {"length": 3}
    nums = {name: values.num for name, values in found.histograms.items() if name != "step_tokens"}
    assert nums == {
        "queue_s": 3,
        "first_token_s": 3,
        "gap_s": 3 * 5,
        "per_token_s": 3,
        "request_s": 3,
        "request_prompt_tokens": 3,
        "choice_tokens": 3,
    }
    # Each prompt but for what was cached, and each token but for the last, which nothing follows; a copied page may
    # save more of a prompt, and the overlapped step after an end computes one that nobody reads.
    num_expected = found.prompt_tokens - found.cached_prompt_tokens + 3 * 5
    assert abs(found.histograms["step_tokens"].sum - num_expected) <= 3
    assert found.histograms["step_tokens"].sum == llm.stats()["num_computed_tokens"]
    assert found.histograms["choice_tokens"].sum == 18
    for output in outputs:
        assert 0 <= output.metrics["queue_s"] <= output.metrics["ttft_s"] <= output.metrics["e2e_s"]
    # A gap is the time between two reads, so all of them together are what lies between first and last tokens.
    gaps_s = found.histograms["gap_s"].sum
    assert gaps_s == pytest.approx(found.histograms["per_token_s"].sum * 5)
    assert gaps_s <= sum(output.metrics["e2e_s"] - output.metrics["ttft_s"] for output in outputs)
    assert found.histograms["first_token_s"].sum == pytest.approx(sum(each.metrics["ttft_s"] for each in outputs))


def test_every_end_is_counted_once(llm) -> None:
    engine = llm.engine
    llm.generate("hello", greedy(n=2))
    llm.generate("hello", greedy(max_tokens=0))
    llm.generate("hello", greedy(), timeout_s=1e-9, use_tqdm=False)
    engine.add("gone", [5, 6], greedy())
    engine.step()
    engine.abort("gone")
    engine.abort("gone")
    found = engine.metrics.snapshot()
    assert {reason: num for reason, num in found.finished.items() if num} == {"length": 3, "timeout": 1, "abort": 1}
    assert found.histograms["request_s"].num == 4
    assert found.histograms["queue_s"].num == 3, "the one without time never ran"
    assert found.histograms["first_token_s"].num == 2


def test_a_failed_step_counts_an_error(llm, monkeypatch) -> None:
    def fail(*args, **named):
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    llm.engine.add("bad", [5, 6], greedy())
    while llm.engine.has_work:
        moved = llm.engine.step()
    assert moved[0][0].outputs[0].finish_reason == "error"
    found = llm.engine.metrics.snapshot()
    assert found.finished["error"] == 1 and found.histograms["first_token_s"].num == 0


def test_queue_time_is_until_the_first_lane(llm) -> None:
    outputs = llm.generate(["hello"] * 8, greedy(max_tokens=20))
    queued = sorted(output.metrics["queue_s"] for output in outputs)
    first_end = min(output.metrics["e2e_s"] for output in outputs)
    assert queued[4] >= first_end / 2 > queued[0], "four run at once, so the others wait for one to end"


def test_a_snapshot_is_whole_while_another_thread_writes() -> None:
    metrics, stop = EngineMetrics(64), threading.Event()

    def write() -> None:
        while not stop.is_set():
            metrics.first(0.5, 3, 1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            found = metrics.snapshot()
            num = found.histograms["first_token_s"].num
            assert (found.prompt_tokens, found.cached_prompt_tokens) == (3 * num, num)
            assert found.histograms["first_token_s"].sum == pytest.approx(0.5 * num)
    finally:
        stop.set()
        thread.join()
