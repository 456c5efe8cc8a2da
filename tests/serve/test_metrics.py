"""The exposition, read by Prometheus's own parser, against what was measured."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.metrics import ChoiceTimes, EngineMetrics
from jaxinfer.serve.metrics import ServerMetrics

STATS = {
    "num_running": 3,
    "queue_len": 2,
    "pages_used": 25,
    "pages_cached": 11,
    "pages_total": 100,
    "padding_waste": 0.25,
    "num_looked_up_tokens": 80,
    "num_cached_tokens": 40,
    "num_preemptions": 1,
    "num_computed_tokens": 75,
    "num_padded_tokens": 25,
    "num_compiles": 6,
    "num_programs_loaded": 2,
    "compile_time_s": 1.5,
}


class FakeLLM:
    """As much of `AsyncLLM` as is read."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics(1000)
        self.closed = False

    def stats(self) -> dict[str, float | int]:
        if self.closed:
            raise RuntimeError("this AsyncLLM is closed")
        return STATS


def measured() -> FakeLLM:
    llm = FakeLLM()
    llm.metrics.admitted(0.4)
    llm.metrics.first(0.07, 12, 8)
    llm.metrics.tokens(1, None)
    llm.metrics.tokens(1, 0.004)
    llm.metrics.tokens(1, 0.3)
    llm.metrics.step(40)
    llm.metrics.finished([ChoiceTimes(3, 10.0, 10.5, "stop"), ChoiceTimes(1, 10.0, 10.0, "length")], 1.2)
    return llm


def samples(metrics: ServerMetrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if sample.name.startswith("jaxinfer:"):
                assert sample.labels["model_name"] == "tiny", sample
            key = sample.name + "".join(f",{name}={value}" for name, value in sorted(labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_exposition() -> None:
    found = samples(ServerMetrics("tiny", measured()))
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "pages_used": 25,
        "pages_total": 100,
        "padding_waste_ratio": 0.25,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 40,
        "num_preemptions_total": 1,
        "compiles_total": 6,
        "compile_seconds_total": 1.5,
        "prompt_tokens_total": 12,
        "prompt_tokens_cached_total": 8,
        "generation_tokens_total": 3,
        "request_success_total,finished_reason=stop": 1,
        "request_success_total,finished_reason=length": 1,
        "request_success_total,finished_reason=error": 0,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.07,
        "time_to_first_token_seconds_bucket,le=0.06": 0,
        "time_to_first_token_seconds_bucket,le=0.08": 1,
        "time_to_first_token_seconds_bucket,le=+Inf": 1,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_bucket,le=0.01": 1,
        "request_time_per_output_token_seconds_count": 1,
        "request_time_per_output_token_seconds_sum": 0.25,
        "e2e_request_latency_seconds_sum": 1.2,
        "request_queue_time_seconds_sum": 0.4,
        "request_prompt_tokens_bucket,le=10.0": 0,
        "request_prompt_tokens_bucket,le=20.0": 1,
        "request_generation_tokens_sum": 4,
        "iteration_tokens_total_count": 1,
    }
    assert {name: found[f"jaxinfer:{name}"] for name in expected} == pytest.approx(expected)
    assert found["process_start_time_seconds"] > 0


def test_http_requests() -> None:
    metrics = ServerMetrics("tiny", FakeLLM())
    metrics.answered("POST", "/v1/completions", 200, 0.3)
    metrics.answered("POST", "/v1/completions", 200, 0.3)
    metrics.answered("POST", "/v1/completions", 429, 0.001)
    found = samples(metrics)
    prefix = "jaxinfer:http_requests_total,method=POST,path=/v1/completions"
    assert found[f"{prefix},status=200"] == 2 and found[f"{prefix},status=429"] == 1
    assert found["jaxinfer:http_request_duration_seconds_count,path=/v1/completions"] == 3


def test_a_closed_engine_leaves_the_rest() -> None:
    llm = measured()
    llm.closed = True
    found = samples(ServerMetrics("tiny", llm))
    assert found["process_start_time_seconds"] > 0 and not any("num_requests" in name for name in found)


def test_two_servers_in_a_process_have_registries_of_their_own() -> None:
    ServerMetrics("a", FakeLLM())
    ServerMetrics("b", FakeLLM())
