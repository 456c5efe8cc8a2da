"""Spans, collected by the SDK's exporter in memory."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxinfer import SamplingParams
from jaxinfer.serve.request_log import RequestRecord
from jaxinfer.serve.tracing import Tracer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    yield tracer
    tracer.close()


def chat_record(**fields) -> RequestRecord:
    record = RequestRecord("id-1", "POST", "/v1/chat/completions", status=200, route="/v1/chat/completions", model="m")
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_a_generation_is_a_span_with_genai_attributes(tracer, exporter) -> None:
    record = chat_record(
        params=SamplingParams(temperature=0.5, max_tokens=8, stop=["END"], n=2),
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=3,
        finish_reasons=["stop"],
        ttft_s=0.2,
        prompt="secret words",
        tenant="team",
    )
    tracer.finish(tracer.start({"traceparent": TRACEPARENT}), record)
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat m" and span.kind is SpanKind.SERVER
    assert span.context.trace_id == int(TRACEPARENT[3:35], 16)
    assert span.parent is not None and span.parent.span_id == int(TRACEPARENT[36:52], 16)
    found = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxinfer",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.id": "id-1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_to_first_token": 0.2,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "secret" not in str(found) and "gen_ai.request.seed" not in found
    assert span.status.status_code is not StatusCode.ERROR


def test_other_requests_and_failures(tracer, exporter) -> None:
    record = RequestRecord("id-2", "GET", "/v1/models", status=500, route="/v1/models", error="KeyError")
    tracer.finish(tracer.start({"traceparent": "not one"}), record)
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /v1/models" and span.parent is None
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "KeyError"
    assert not any(name.startswith("gen_ai.operation") for name in span.attributes)


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            tracer = Tracer.to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "my-service")
            tracer.finish(tracer.start({}), chat_record())
            tracer.close()
        finally:
            collector.shutdown()
            thread.join()
    ((path, body),) = received
    assert path == "/v1/traces" and b"my-service" in body and b"chat m" in body


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://host:1", "", "http://"])
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be a URL like http://localhost:4318/v1/traces"):
        Tracer.to(endpoint)


def test_nothing_is_imported_unless_on() -> None:
    code = "import sys; from jaxinfer.serve import tracing, access_log; print('opentelemetry' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
