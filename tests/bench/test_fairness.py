"""The simulated tenants: fair sharing bounds what the small one waits, and the command draws it."""

from __future__ import annotations

import json
import statistics

import pytest

from jaxinfer.bench.__main__ import main
from jaxinfer.bench.fairness import simulate


def test_a_hundred_requests_of_another_tenant_cost_no_more_than_half_the_engine():
    alone, fair, unfair = simulate(0, fair=True), simulate(100, fair=True), simulate(100, fair=False)
    waits = [statistics.median(run.latency_s) for run in (alone, fair, unfair)]
    assert waits[0] < waits[1] < 2.5 * waits[0] < waits[2]
    assert all(run.tokens["small"][-1] == alone.tokens["small"][-1] for run in (fair, unfair))
    assert fair.tokens["large"][-1] == unfair.tokens["large"][-1] == 100 * (64 + 31)


def test_the_command_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["fairness", "--json", "--plot", str(tmp_path / "fairness.svg")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["targets"][0]["met"] and "</svg>" in (tmp_path / "fairness.svg").read_text()
