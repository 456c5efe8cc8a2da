"""`/metrics`: the engine's counts and histograms for Prometheus, under vLLM's names where the meaning is the same.

Numbers are read when they are scraped: counters of the engine are plain ints, and what its thread writes is copied
under a lock, so a scrape waits for no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from jaxinfer.metrics import FIRST_TOKEN_BOUNDS_S, HistogramValues

router = APIRouter()

PREFIX = "jaxinfer:"

# (name, key of the engine's stats, what it is)
GAUGES = (
    ("num_requests_running", "num_running", "Sequences that have a row of the batch."),
    ("num_requests_waiting", "queue_len", "Sequences that wait for a row or for pages."),
    ("pages_used", "pages_used", "Pages of the cache that running sequences hold."),
    ("pages_cached", "pages_cached", "Pages that nobody holds and that a later prompt may find in the prefix cache."),
    ("pages_total", "pages_total", "Pages of the cache."),
    ("padding_waste_ratio", "padding_waste", "Padded tokens over all tokens that steps ran, since the start."),
)
COUNTERS = (
    ("prefix_cache_queries", "num_looked_up_tokens", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "num_cached_tokens", "Tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Sequences that gave up their pages and waited again."),
    ("computed_tokens", "num_computed_tokens", "Tokens that steps computed, padding not counted."),
    ("padded_tokens", "num_padded_tokens", "Tokens of padding that steps computed beside them."),
    ("compiles", "num_compiles", "Programs compiled."),
    ("programs_loaded", "num_programs_loaded", "Programs loaded from the store instead of compiled."),
    ("compile_seconds", "compile_time_s", "Seconds spent compiling and loading programs."),
)
# (name, key of the snapshot's histograms, what it is)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token_s", "Arrival to first token, queueing included."),
    ("inter_token_latency_seconds", "gap_s", "Gap between two tokens of a choice."),
    ("request_time_per_output_token_seconds", "per_token_s", "First to last token of a choice, over the gaps."),
    ("e2e_request_latency_seconds", "request_s", "Arrival to end of a request."),
    ("request_queue_time_seconds", "queue_s", "Arrival to the first step that a request ran in."),
    ("request_prompt_tokens", "request_prompt_tokens", "Tokens of a request's prompt."),
    ("request_generation_tokens", "choice_tokens", "Tokens that a choice got."),
    ("iteration_tokens_total", "step_tokens", "Tokens that one step computed."),
)


class ServerMetrics:
    """The registry of one server.

    Args:
        model_name: label of every metric.
        llm: has `stats()` and `metrics`, as `AsyncLLM` has.
    """

    def __init__(self, model_name: str, llm: Any):
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(model_name, llm))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["model_name", "method", "path", "status"]
        self._requests = Counter(f"{PREFIX}http_requests", "HTTP requests answered.", labels, registry=self.registry)
        self._durations = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "Arrival of an HTTP request to the end of its answer.",
            ["model_name", "path"],
            buckets=FIRST_TOKEN_BOUNDS_S,
            registry=self.registry,
        )
        self._model_name = model_name

    def answered(self, method: str, path: str, status: int, duration_s: float | int) -> None:
        """Count an HTTP request; `path` is its route's, so that there are few."""
        self._requests.labels(self._model_name, method, path, str(status)).inc()
        self._durations.labels(self._model_name, path).observe(duration_s)

    def render(self) -> bytes:
        """The exposition in Prometheus's text format, whatever a client accepts: OpenMetrics has no colons in names."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Turns what the engine counts into metric families, at every scrape anew."""

    def __init__(self, model_name: str, llm: Any):
        self._labels = {"model_name": model_name}
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        try:
            stats, found = self._llm.stats(), self._llm.metrics.snapshot()
        except RuntimeError:  # closed, while the server goes down
            return
        for name, key, text in GAUGES:
            yield self._add(GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels)), stats[key])
        usage = stats["pages_used"] / max(1, stats["pages_total"])
        text = "Share of the cache's pages that running sequences hold, 0 to 1."
        yield self._add(GaugeMetricFamily(f"{PREFIX}kv_cache_usage_perc", text, labels=list(self._labels)), usage)
        for name, key, text in COUNTERS:
            yield self._counter(name, text, stats[key])
        yield self._counter("prompt_tokens", "Tokens of prompts, cached ones included.", found.prompt_tokens)
        text = "Tokens of prompts that were found in the prefix cache."
        yield self._counter("prompt_tokens_cached", text, found.cached_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", found.generation_tokens)
        ended = CounterMetricFamily(
            f"{PREFIX}request_success", "Choices that have ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, num in sorted(found.finished.items()):
            ended.add_metric([*self._labels.values(), reason], num)
        yield ended
        for name, key, text in HISTOGRAMS:
            yield self._histogram(name, text, found.histograms[key])

    def _add(self, family: Any, value: float | int) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float | int) -> Metric:
        return self._add(CounterMetricFamily(PREFIX + name, text, labels=list(self._labels)), value)

    def _histogram(self, name: str, text: str, values: HistogramValues) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=list(self._labels))
        names = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
        buckets = list(zip(names, values.cumulative, strict=True))
        family.add_metric(list(self._labels.values()), buckets, sum_value=values.sum)
        return family


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.render(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
