"""The command on a tiny model: the fields of its reports, the limits it computes, and what it says of bad arguments."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from jaxinfer.bench.__main__ import main
from jaxinfer.bench.bandwidth import BandwidthProbe, cache_bytes, weight_bytes
from jaxinfer.bench.phases import PHASES
from jaxinfer.bench.report import as_text
from jaxinfer.bench.start import measure_start
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.load import load_model

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
SPREAD = {"median", "best", "worst", "num"}
LENGTHS = ["--prompt-tokens", "32"]  # and 64 out: the same programs as test_context's
QUICK = ["--repeats", "2", "--probe-bytes", "65536", "--json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(GOLDEN / "llama-gqa-tied", folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:112]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def report_of(capsys, *argv: str) -> dict:
    assert main([*argv]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    report = json.loads(out)
    assert set(report) == {"benchmark", "environment", "settings", "results", "targets"}
    assert report["benchmark"] == argv[0]
    return report


def test_latency(capsys, model):
    report = report_of(capsys, "latency", "--model", model, *LENGTHS, *QUICK)
    results = report["results"]
    assert results["weight_bytes"] == sum(leaf.nbytes for leaf in leaves_of("llama-gqa-tied"))
    for name in ("ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_step_s", "decode_step_over_floor"):
        assert set(results[name]) == SPREAD and results[name]["median"] > 0
    assert results["decode_step_s"]["num"] == 126
    assert report["targets"][0]["at_most"] == 3.0
    assert report["targets"][0]["value"] == results["decode_step_over_floor"]["median"]
    environment, settings = report["environment"], report["settings"]
    assert set(environment) == {"date", "jax", "python", "cpu", "num_cores", "device", "dtype", "model"}
    assert environment["model"] == f"model: {model}" and environment["dtype"] == "float32"
    assert settings["prompt_tokens"] == 32 and settings["repeats"] == 2 and settings["max_model_len"] == 96
    text = as_text(report)
    assert "decode_step_over_floor: " in text and ", at most 3.0: " in text
    columns = next(line.split() for line in text.splitlines() if line.startswith("tpot_s "))
    assert len(columns) == 5 and columns[-1] == "2"


def test_throughput(capsys, model):
    lengths = ["--prompt-tokens", "4", "--output-tokens", "6", "--profile"]
    report = report_of(capsys, "throughput", "--model", model, "--streams", "3,2", *lengths, *QUICK)
    rows, host = report["results"]["streams"], report["results"]["host"]
    assert [row["num_streams"] for row in rows] == [1, 2, 3]
    assert rows[0]["over_one_stream"]["median"] == 1
    assert host["num_streams"] == 3
    (steps,) = host["steps"]
    assert steps["overlap"] is True and steps["step_s"]["num"] == 8 and 0 <= steps["host_share"]["median"] < 1
    assert sum(phase["best"] for phase in steps["phases_s"].values()) <= steps["step_s"]["worst"]
    assert report["targets"] == []


def test_profile(capsys, model):
    lengths = ["--rows", "3", "--prompt-tokens", "4", "--repeats", "1", "--json"]
    report = report_of(capsys, "profile", "--model", model, *lengths)
    results = report["results"]
    assert [each["overlap"] for each in results["steps"]] == [True, False]
    for steps in results["steps"]:
        assert set(steps["phases_s"]) == set(PHASES) and steps["step_s"]["num"] == 4
        assert steps["host_share"]["median"] == pytest.approx(0.5, abs=0.5)
        assert set(steps["host_share_by_difference"]) == SPREAD
    assert results["device"]["forward_s"]["median"] > 0 and results["num_streams"] == 3
    assert report["targets"][0]["at_most"] == 0.03
    assert report["targets"][0]["value"] == results["steps"][0]["host_share"]["median"]
    assert "steps[overlap=True].phases_s.dispatch" in as_text(report)


def test_prefix(capsys, model):
    sizes = ["--turns", "3", "--requests", "3", "--prefix-tokens", "32", "--repeats", "1", "--json"]
    report = report_of(capsys, "prefix", "--model", model, *sizes)
    rows = {row["workload"]: row for row in report["results"]["workloads"]}
    assert list(rows) == ["chat", "shared_prompt", "few_shot"]
    assert all(row["same_tokens"] for row in rows.values())
    assert all(set(row[name]) == SPREAD for row in rows.values() for name in ("time_ratio", "ttft_ratio"))
    # Prompts of 48, 112 and 176 tokens with 15 more each; a chat's next turn lacks the last token of the reply.
    assert rows["chat"]["plain_computed_tokens"] == 48 + 112 + 176 + 3 * 15
    assert rows["chat"]["cached_computed_tokens"] == 48 + 49 + 49 + 3 * 15
    assert rows["chat"]["hit_rate"] == pytest.approx((63 + 127) / (48 + 112 + 176))
    shared = rows["shared_prompt"]
    assert shared["plain_computed_tokens"] == 3 * (32 + 16 + 15)
    assert shared["cached_computed_tokens"] == 32 + 3 * (16 + 15) and shared["computed_prefix_ratio"] == 1
    assert rows["few_shot"]["cached_computed_tokens"] == 32 + 3 * (16 + 3)
    assert report["targets"] == [{"name": "computed_prefix_ratio", "value": 1, "at_most": 1.0, "met": True}]
    assert "workloads[workload=chat].time_ratio" in as_text(report)


def test_context(capsys, model):
    report = report_of(capsys, "context", "--model", model, "--contexts", "16,32,24", "--steps", "2", *QUICK)
    rows = report["results"]["contexts"]
    assert [row["context_len"] for row in rows] == [16, 24, 32]
    # Keys and values of 2 layers, 2 KV heads of 12, in float32.
    assert [row["cache_bytes"] for row in rows] == [length * 2 * 2 * 2 * 12 * 4 for length in (16, 24, 32)]
    assert rows[0]["decode_forward_s"]["num"] == 4
    assert report["targets"][0]["at_most"] == 6.0


def test_load_memory(capsys, model, monkeypatch):
    module = ModuleType("jaxinfer.bench.load_memory")
    measured = {"dtype": "bfloat16", "peak_rss_bytes": 8, "limit_bytes": 7, "within_limit": False}
    asked = []
    module.measure_load_memory = lambda *given: asked.append(given) or measured  # type: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    report = report_of(capsys, "load-memory", "--model", model, "--dtype", "bfloat16", "--json")
    assert report["results"] == measured and report["environment"]["dtype"] == "bfloat16"
    assert report["targets"] == [{"name": "peak_rss_bytes", "value": 8, "at_most": 7, "met": False}]
    assert main(["load-memory", "--model", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"model        model: {model}" in lines and ["limit_bytes", "7"] in [line.split() for line in lines]
    assert lines[-1] == "peak_rss_bytes: 8, at most 7: missed"
    assert asked == [(model, "bfloat16"), (model, "auto")]


def test_start(capsys, model, monkeypatch):
    module = ModuleType("jaxinfer.bench.start")
    times = {"median": 4.5, "best": 3.5, "worst": 9.0, "num": 2}
    measured = {"first": {"first_token_s": 30.0, "phases_s": {"cache": 1.0}}, "second": {"first_token_s": times}}
    asked = []
    module.measure_start = lambda *given: asked.append(given) or {"dtype": "float32", "source": "x", **measured}  # type: ignore
    module.FIRST_LIMIT_S, module.SECOND_LIMIT_S = 25.0, 4.0  # type: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    report = report_of(capsys, "start", "--model", model, "--repeats", "2", "--json")
    assert report["results"] == measured and asked == [(model, "auto", 2)]
    assert [(each["value"], each["at_most"], each["met"]) for each in report["targets"]] == [
        (30.0, 25.0, False),
        (3.5, 4.0, True),
    ]
    assert "first.phases_s.cache" in as_text(report)


@pytest.mark.full
def test_a_second_start_compiles_nothing(model):
    found = measure_start(model, "float32", 1)
    assert (found["dtype"], found["source"]) == ("float32", f"model: {model}")
    first, second = found["first"], found["second"]
    assert first["num_compiles"] >= 2 and second["num_compiles"] == 0 and second["num_programs_loaded"] >= 3
    assert first["all_compiled_s"] > first["first_token_s"] > second["first_token_s"]["best"]
    for each in (first, second):
        assert {"model and tokenizer", "cache", "programs", "first step"} <= set(each["phases_s"])


def test_a_start_that_fails(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ValueError, match="bad.gguf: starts with b'GGML'"):
        measure_start(str(tmp_path / "bad.gguf"), "float32", 1)


def test_log_level_shows_the_phases(capsys, model, caplog):
    with caplog.at_level("INFO", "jaxinfer"):
        report_of(
            capsys, "context", "--model", model, "--contexts", "16,32", "--steps", "2", "--log-level", "info", *QUICK
        )
    said = [record.getMessage() for record in caplog.records if record.name == "jaxinfer"]
    for phase in ("model and tokenizer: ", "cache: ", "programs: ", "program step of "):
        assert any(line.startswith(phase) for line in said), phase


def test_batch_invariance_reaches_the_model_only_when_given(capsys, monkeypatch):
    class Stop(ValueError):
        pass

    def fake(model, **fields):
        raise Stop(json.dumps(fields.get("batch_invariant", "not given")))

    monkeypatch.setattr("jaxinfer.llm.LLM", fake)
    said = []
    for flag in ([], ["--batch-invariant"], ["--no-batch-invariant"]):
        assert main(["latency", "--model", str(GOLDEN / "llama-mha"), *flag]) == 2
        said.append(capsys.readouterr().err)
    assert said == ['error: "not given"\n', "error: true\n", "error: false\n"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "COMMAND"),
        (["speed"], "speed"),
        (["latency", "--dtype", "int3"], "int3"),
        (["latency", "--repeats", "0"], "--repeats"),
        (["latency", "--output-tokens", "3"], "--output-tokens"),
        (["latency", "--nonsense"], "--nonsense"),
        (["throughput", "--streams", "1,x"], "--streams"),
        (["context", "--contexts", "512"], "--contexts"),
        (["latency", "--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_arguments(capsys, argv, part):
    try:
        code = main(argv)
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ") and part in captured.err


def test_context_beyond_the_model(capsys, model):
    assert main(["context", "--model", model, "--contexts", "100,1000"]) == 2
    assert "max_model_len=1064 must be from 2 up to the model's 256" in capsys.readouterr().err


def leaves_of(variant: str) -> list:
    import jax

    return jax.tree.leaves(load_model(GOLDEN / variant, "float32").params)


def test_weight_bytes_leave_out_an_untied_input_table():
    model = load_model(GOLDEN / "llama-mha", "float32")
    assert not model.config.tie_embeddings
    table = model.config.vocab_size * model.config.embed_dim * 4
    assert weight_bytes(EngineConfig(model.config)) == sum(leaf.nbytes for leaf in leaves_of("llama-mha")) - table
    assert weight_bytes(EngineConfig(model.config, dtype="bfloat16")) * 2 == weight_bytes(EngineConfig(model.config))


def test_cache_bytes_stop_growing_at_a_window():
    shape = ModelConfig("mistral", 10, 8, 8, 2, 2, 1, 4, 100, sliding_windows=(16, 0))
    assert cache_bytes(shape, 10, "float32") == 2 * (10 + 10) * 4 * 4
    assert cache_bytes(shape, 50, "bfloat16") == 2 * (16 + 50) * 4 * 2


def test_probe_reads_what_it_says():
    times = iter([0.0, 1.0, 10.0, 12.0])
    probe = BandwidthProbe(4000, lambda: next(times))
    assert probe() == 3 * 4000 / 2
