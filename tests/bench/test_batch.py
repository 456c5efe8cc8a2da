"""The bench of the batch command on a tiny model and without one, and the memory of a job over many records."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest

from jaxinfer.batch.__main__ import main as run_batch
from jaxinfer.batch.records import InputRecord
from jaxinfer.batch.stand_in import NUM_ROWS, StandIn, open_stand_in
from jaxinfer.bench.__main__ import main
from jaxinfer.bench.batch.job import ProcessorTime, mixed_records, run_job, short_records, write_jsonl
from jaxinfer.bench.batch.memory import measure_memory

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny-llama")
MIB = 2**20
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def report_of(capsys, *argv: str) -> dict:
    assert main(["batch", *argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"benchmark", "environment", "settings", "results", "targets"}
    return report


def test_records_are_the_same_each_time_and_mixed():
    records = mixed_records(64, 2, 16, 48)
    assert records == mixed_records(64, 2, 16, 48)
    assert all(12 <= record["max_tokens"] <= 48 for record in records)
    starts = [" ".join(record["prompt"].split()[:16]) for record in records]
    shared = [starts.count(start) for start in set(starts)]
    assert sum(count for count in shared if count > 1) == 32 and len([c for c in shared if c > 1]) == 2
    assert len({len(record["prompt"].split()) for record in records}) > 20


@pytest.mark.slow
def test_a_job_against_generate(capsys):
    sizes = ["--records", "12", "--output-tokens", "8", "--prefix-words", "12", "--max-num-seqs", "4", "--repeats", "1"]
    report = report_of(capsys, "--model", TINY, *sizes, "--windows", "4")
    results = report["results"]
    assert results["same_tokens"] is True  # which also says that both ran the same prompts
    assert results["output_tokens"] == sum(record["max_tokens"] for record in mixed_records(12, 4, 12, 8))
    assert results["generate"]["cache_hit_rate"] > 0 and results["generate"]["output_tokens_per_s"]["num"] == 1
    assert [row["window"] for row in results["jobs"]] == [4]
    for row, target in zip(results["jobs"], report["targets"], strict=True):
        ratio = row["output_tokens_per_s"]["median"] / results["generate"]["output_tokens_per_s"]["median"]
        assert row["over_generate"]["median"] == target["value"] == pytest.approx(ratio)
        assert target["at_least"] == 0.95
        cpu_s = row["cpu_over_generate"]["median"] * results["generate"]["cpu_s_per_token"]["median"]
        assert row["cpu_s_per_token"]["median"] == pytest.approx(cpu_s) and cpu_s > 0
    assert report["environment"]["model"].endswith("tiny-llama") and report["settings"]["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--records", "0"], "--records 0 must be at least 1"),
        (["--windows", "0"], "--windows are from 1 up"),
        (["--stand-in"], "--stand-in goes with --memory"),
        (["--memory", "5", "--stand-in"], "too few: give more records"),
    ],
)
def test_arguments_that_make_no_sense(capsys, flags, message):
    assert main(["batch", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_job_that_fails_is_told(tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", [{"text": "no prompt"}])
    with pytest.raises(RuntimeError, match="stand_in ended with 1: "):
        run_job("jaxinfer.batch.stand_in", tmp_path / "prompts.jsonl", tmp_path / "out", [])


def test_processor_time_of_the_last_seconds():
    used = ProcessorTime()
    assert used.of_the_last(5.0) == 0
    used._noted = [(0.0, 1.0), (1.0, 3.0), (2.0, 4.0), (3.0, 4.5)]
    assert (used.of_the_last(1.2), used.of_the_last(9.0)) == (0.5, 3.5)
    used(-1)  # gone
    assert len(used._noted) == 4


@needs_proc
def test_memory_of_many_records(capsys):
    report = report_of(capsys, "--memory", "20000", "--stand-in")
    results = report["results"]
    assert (results["records"], results["errors"], results["growth"]) == (20_000, 0, "none")
    quarters = [each["median"] for each in results["rss_bytes"]]
    assert 10 * MIB < min(quarters) <= max(quarters) <= results["peak_rss_bytes"]
    # A kilobyte kept of each record would be 10 MB more from the second quarter to the last.
    assert quarters[3] - quarters[1] < 8 * MIB, quarters
    assert results["peak_rss_bytes"] < 160 * MIB, results
    assert results["records_per_s"] > results["records_per_s_with_start"] > 0


def test_few_records_are_held_at_once(tmp_path, monkeypatch):
    """However many there are: those of three windows, and those that the engine has."""
    held: list[int] = []
    step, count = StandIn.step, 0

    def counted(self):
        nonlocal count
        count += 1
        if count % 20 == 0:
            held.append(sum(type(each) is InputRecord for each in gc.get_objects()))
        return step(self)

    monkeypatch.setattr(StandIn, "step", counted)
    write_jsonl(tmp_path / "prompts.jsonl", short_records(3_000))
    flags = ["--window", "64", "--max-tokens", "8", "--records-per-shard", "500", "--quiet"]
    paths = ["--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out")]
    assert run_batch([*paths, *flags], open_stand_in) == 0
    assert len(held) >= 2
    assert 0 < max(held) <= 3 * 64 + 1 + 2 * NUM_ROWS, held
    assert count == pytest.approx(3_000 / NUM_ROWS, rel=0.5)


@pytest.mark.full
@needs_proc
def test_a_million_records():
    results = measure_memory(1_000_000, 8, stand_in=True, model=None)
    assert (results["records"], results["errors"], results["growth"]) == (1_000_000, 0, "none")
    quarters = [each["median"] for each in results["rss_bytes"]]
    assert quarters[3] - quarters[1] < 4 * MIB, quarters  # 8 bytes kept of each record
    assert results["peak_rss_bytes"] < 160 * MIB, results
