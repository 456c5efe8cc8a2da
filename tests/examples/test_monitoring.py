"""The Grafana dashboard and the Prometheus configuration name what a server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.metrics import EngineMetrics
from jaxinfer.serve.metrics import COUNTERS, GAUGES, ServerMetrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DASHBOARD = json.loads((EXAMPLES / "grafana" / "dashboard.json").read_text())


class IdleLLM:
    """An engine that has done nothing."""

    metrics = EngineMetrics(1000)

    def stats(self) -> dict[str, float | int]:
        return {key: 0 for _, key, _ in (*GAUGES, *COUNTERS)}


def exported() -> dict[str, set[str]]:
    """Every sample's name and its labels."""
    metrics = ServerMetrics("tiny", IdleLLM())
    metrics.answered("GET", "/", 200, 0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def expressions(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "definition") if key in value]
        return own + [found for each in value.values() for found in expressions(each)]
    return [found for each in value for found in expressions(each)] if isinstance(value, list) else []


def test_each_metric_of_the_dashboard_is_exported() -> None:
    found = exported()
    used = {name for each in expressions(DASHBOARD) for name in re.findall(r"\b(?:jaxinfer:|process_)\w+", each)}
    assert len(used) > 30 and used - set(found) == set()
    for each in expressions(DASHBOARD):
        grouped = {name for group in re.findall(r"by \(([^)]*)\)", each) for name in group.split(", ")}
        for name in re.findall(r"\bjaxinfer:\w+", each):
            assert grouped <= found[name], f"{each}: {name} has no such label"


def test_each_metric_of_the_server_is_in_the_dashboard() -> None:
    text = " ".join(expressions(DASHBOARD))
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported() if name.startswith("jaxinfer:")}
    names = {name for name in names if f"{name}_total" not in names}
    assert {name for name in names if name not in text} == set()


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells and at["x"] + at["w"] <= 24, f"{panel['title']} overlaps"
        covered |= cells
    for each in expressions(DASHBOARD):
        assert each.count("(") == each.count(")") and each.count("{") == each.count("}")


def test_prometheus_scrapes_the_job_of_the_dashboard() -> None:
    (job,) = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert f'job="{job["job_name"]}"' in " ".join(expressions(DASHBOARD))
    assert job.get("metrics_path", "/metrics") == "/metrics"
