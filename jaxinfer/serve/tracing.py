"""OpenTelemetry traces: a span a request, with the GenAI semantic conventions' attributes. Needs the extra `otel`.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ names the attributes. Those of latency have vLLM's
names, since the conventions have none for them yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.serve.request_log import RequestRecord

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


class Tracer:
    """Makes spans with an SDK's `TracerProvider`."""

    def __init__(self, provider: Any):
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("jaxinfer")
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR

    @classmethod
    def to(cls, endpoint: str, service_name: str = "jaxinfer") -> Tracer:
        """One that exports by OTLP over HTTP, in the background.

        Args:
            endpoint: of the collector, whole: `http://localhost:4318/v1/traces`.
            service_name: unless the variable `OTEL_SERVICE_NAME` has another.

        Raises:
            ValueError: the endpoint is no http or https URL.
            RuntimeError: the extra `otel` is not installed.
        """
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ValueError(f"otlp_traces_endpoint={endpoint!r} must be a URL like http://localhost:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise RuntimeError("otlp_traces_endpoint needs OpenTelemetry: pip install 'jaxinfer[otel]'") from error
        resource = Resource.create({"service.name": service_name}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def start(self, headers: Mapping[str, str]) -> Any:
        """A span from now on; the child of the one that a W3C `traceparent` header names."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return self._tracer.start_span("HTTP", context=self._propagator.extract(carrier), kind=self._kind)

    def finish(self, span: Any, record: RequestRecord) -> None:
        """End it, with what is known of the request by now."""
        operation = OPERATIONS.get(record.route)
        span.update_name(
            f"{operation} {record.model or ''}".strip() if operation else f"{record.method} {record.route}"
        )
        span.set_attributes(attributes_of(record, operation))
        if record.status >= 500 or record.error:
            span.set_status(self._error, record.error or f"status {record.status}")
        span.end()

    def close(self) -> None:
        """Export what has not been."""
        self._provider.shutdown()


def attributes_of(record: RequestRecord, operation: str | None) -> dict[str, Any]:
    """A span's attributes; what is not known is left out, and no text of prompt or answer is among them."""
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "gen_ai.request.id": record.request_id,
    }
    if operation:
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxinfer",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.request.stream": record.stream,
            "user.id": record.tenant or None,
        }
        if record.params is not None:
            found |= {attribute: getattr(record.params, name) for name, attribute in _PARAMS.items()}
            found["gen_ai.request.choice.count"] = record.params.n
            found["gen_ai.request.stop_sequences"] = list(record.params.stop_strings) or None
    if record.num_prompt_tokens is not None:
        found |= {
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_to_first_token": record.ttft_s,
            "gen_ai.latency.e2e": record.e2e_s,
        }
    return {name: value for name, value in found.items() if value is not None}
