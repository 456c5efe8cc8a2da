"""Metrics, access log, traces and `/status` of a server that serves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import NAME, Running, running

CHAT = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 6, "ignore_eos": True}


def samples(served: Running) -> dict[str, float]:
    """Every sample of `/metrics`, by name and labels."""
    answer = served.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[",".join([sample.name, *labels])] = sample.value
    return found


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The access log's JSON lines, once as many are there as are waited for."""
    caplog.set_level(logging.INFO, logger="jaxinfer.access")

    def read(num: int = 1) -> list[dict[str, Any]]:
        for _ in range(200):
            found = [each.getMessage() for each in caplog.records if each.name == "jaxinfer.access"]
            if len(found) >= num:
                break
            time.sleep(0.02)  # a line is written after its answer has left
        return [json.loads(line) for line in found]

    yield read


@pytest.fixture(scope="module")
def logged(engine: Any) -> Iterator[Running]:
    with running(engine, log_format="json") as found:
        yield found


def test_metrics_move_with_requests(logged: Running) -> None:
    before = samples(logged)
    usage = logged.post("/v1/chat/completions", CHAT).json()["usage"]
    logged.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "n": 2})
    logged.post("/v1/completions", {"prompt": "x", "nothing_like_it": 1})
    after = samples(logged)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["jaxinfer:generation_tokens_total"] == 6 + 2 * 3
    assert grown["jaxinfer:prompt_tokens_total"] >= usage["prompt_tokens"] + 1
    assert grown["jaxinfer:request_success_total,finished_reason=length"] == 3
    assert grown["jaxinfer:time_to_first_token_seconds_count"] == 2
    assert grown["jaxinfer:inter_token_latency_seconds_count"] == 5 + 2 * 2
    assert grown["jaxinfer:e2e_request_latency_seconds_count"] == 2
    assert grown["jaxinfer:http_requests_total,method=POST,path=/v1/chat/completions,status=200"] == 1
    assert grown["jaxinfer:http_requests_total,method=POST,path=/v1/completions,status=400"] == 1
    assert after["jaxinfer:num_requests_running"] == 0 and after["jaxinfer:pages_total"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_is_logged(logged: Running, lines: Any, stream: bool) -> None:
    answer = logged.post(
        "/v1/chat/completions",
        {**CHAT, "stream": stream, "user": "team", "n": 2},
        headers={"X-Request-Id": "mine-1"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    (line,) = lines()
    expected = {
        "request_id": "mine-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": NAME,
        "tenant": "team",
        "output_tokens": 12,
        "finish_reason": "length,length",
    }
    assert {name: line.get(name) for name in expected} == expected
    assert line["prompt_tokens"] > 0 and 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"] <= line["duration_s"]
    assert "hello" not in json.dumps(line)


def test_several_prompts_are_one_line(logged: Running, lines: Any) -> None:
    body = {"prompt": ["one", "two", "three"], "max_tokens": 2, "ignore_eos": True}
    usage = logged.post("/v1/completions", body).json()["usage"]
    (line,) = lines()
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 6)
    assert line["finish_reason"] == "length,length,length"


def test_refusals_are_logged(logged: Running, lines: Any) -> None:
    logged.post("/v1/chat/completions", {"messages": []})
    logged.get("/nowhere")
    first, second = lines(2)
    assert (first["status"], second["status"]) == (400, 404) and "prompt_tokens" not in first


def test_an_internal_error_has_the_id_too(logged: Running, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("inside")

    with monkeypatch.context() as patch:
        patch.setattr(logged.server.llm, "stats", fail)
        # Uvicorn closes the connection after an exception, so this one is for nobody else.
        answer = logged.get("/status", headers={"X-Request-Id": "mine-2", "Connection": "close"})
    assert answer.status_code == 500 and answer.headers.get_list("x-request-id") == ["mine-2"]
    (line,) = lines()
    assert (line["status"], line["error"], line["request_id"]) == (500, "KeyError", "mine-2")


def test_a_client_that_leaves_is_logged_as_such(logged: Running, lines: Any) -> None:
    body = {**CHAT, "max_tokens": 200, "stream": True}
    with logged.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    (line,) = lines()
    assert line["disconnected"] is True and line["finish_reason"] == "abort" and line["output_tokens"] < 200


def test_status(logged: Running) -> None:
    before = logged.get("/status").json()
    logged.post("/v1/chat/completions", CHAT)
    after = logged.get("/status").json()
    assert after["model"] == NAME and after["state"] == "ready" and after["settings"]["max_model_len"] == 256
    assert after["stats"]["num_running"] == 0 and after["stats"]["pages_total"] > 0
    assert after["totals"]["generation_tokens"] == before["totals"]["generation_tokens"] + 6
    assert after["totals"]["requests"] == before["totals"]["requests"] + 1
    assert after["uptime_s"] >= before["uptime_s"]


def test_keys_traces_and_prompts(engine: Any, lines: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from jaxinfer.serve.tracing import Tracer

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = {"api_keys": {"key-a": "team-a"}, "log_format": "json", "log_prompts": True}
    with running(engine, tracer=Tracer(provider), **settings) as served:
        for path in ("/status", "/metrics", "/v1/models"):
            assert served.get(path).status_code == 401
        assert served.get("/").status_code == served.get("/page/main.js").status_code == 200
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"Authorization": "Bearer key-a", "traceparent": parent}
        assert served.post("/v1/chat/completions", CHAT, headers=headers).status_code == 200
        assert served.get("/status", headers=headers).status_code == 200
    refused, *_, answered = lines(4)
    assert (refused["path"], refused["status"]) == ("/status", 401)
    assert answered["tenant"] == "team-a" and "hello there" in answered["prompt"][0]
    (span,) = [each for each in exporter.get_finished_spans() if each.name == f"chat {NAME}"]
    assert span.context.trace_id == int(parent[3:35], 16)
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert "hello" not in str(dict(span.attributes))
