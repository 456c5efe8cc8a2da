"""The load generator against a server with known delays and faults: what it measures, and that each check can fail."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from jaxinfer.bench.__main__ import main
from jaxinfer.bench.serve.arrivals import Load
from jaxinfer.bench.serve.client import Client, normalize_url
from jaxinfer.bench.serve.prompts import Lengths, multi_turn_sessions, random_sessions
from jaxinfer.bench.serve.run import BodyFields, Run, run_load


def sent(server: Any, load: Load, sessions=None, endpoint: str = "completions", timeout_s=10.0, **fake) -> Run:
    fields = BodyFields(extra={"fake": fake})

    async def go() -> Run:
        async with Client(server.url, endpoint, timeout_s=timeout_s) as client:
            chosen = sessions or random_sessions(Lengths(5, 6))
            return await run_load(client, chosen, load, lambda turn, past: fields.body(endpoint, "m", turn, past))

    return asyncio.run(go())


def report_of(capsys, server: Any, *argv: str, code: int = 0, **fake) -> dict:
    extra = ["--extra-body", json.dumps({"fake": fake})] if fake else []
    arguments = ["--base-url", server.url, "--output-len", "4", *argv, *extra, "--json"]
    assert main(["serve", *arguments]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_measures_known_delays(server, endpoint):
    run = sent(server, Load(concurrency=2, num_requests=4), endpoint=endpoint, first_ms=60, gap_ms=30)
    assert len(run.records) == 4 and all(record.ok and record.done for record in run.records)
    for record in run.records:
        assert record.ttft_s is not None and record.tpot_s is not None and record.e2e_s is not None
        assert 0.058 < record.ttft_s < 0.5 and 0.029 < record.tpot_s < 0.2
        assert record.e2e_s == pytest.approx(record.ttft_s + 5 * record.tpot_s)
        assert len(record.gaps_s) == 5 and min(record.gaps_s) > 0.02
        assert (record.text, record.output_tokens, record.prompt_tokens) == (" 0 1 2 3 4 5", 6, 7)
        assert record.finish_reason == "length" and record.status == 200
    assert 2 * 0.2 < run.duration_s < 3 and server.most_at_once == 2


def test_one_token_has_no_tpot(server):
    (record,) = sent(server, Load(concurrency=1, num_requests=1), random_sessions(Lengths(5, 1))).records
    assert record.tpot_s is None and record.gaps_s == [] and record.ttft_s == record.e2e_s


def test_waiting_for_a_place_is_part_of_ttft(server):
    load = Load(process="burst", concurrency=1, num_requests=3)
    records = sent(server, load, first_ms=50).records
    assert server.most_at_once == 1
    waits = sorted(record.sent_s - record.due_s for record in records)
    assert waits[0] < 0.3 and 0.048 < waits[1] < 0.5 and 0.097 < waits[2] < 0.7
    for record in records:
        assert record.ttft_s is not None and record.first_s is not None
        assert record.ttft_s == pytest.approx((record.first_s - record.sent_s) + (record.sent_s - record.due_s))


def test_an_open_loop_does_not_wait_for_answers(server):
    run = sent(server, Load(rate=100, process="fixed", num_requests=10), first_ms=150)
    assert server.most_at_once >= 8 and run.duration_s < 10 * 0.15
    assert [record.due_s for record in run.records] == pytest.approx([index / 100 for index in range(10)])
    assert all(0 <= record.woke_s - record.due_s < 0.3 for record in run.records)


def test_duration_ends_the_sending_and_not_the_requests(server):
    for load in (Load(rate=50, process="fixed", duration_s=0.2), Load(concurrency=2, duration_s=0.2)):
        run = sent(server, load, first_ms=40)
        assert 2 <= len(run.records) <= 10 and all(record.ok for record in run.records)


def test_a_conversation_repeats_what_was_said(server):
    sessions = multi_turn_sessions(Lengths(2, 3), 2)
    asked = [turn.content for turn in next(multi_turn_sessions(Lengths(2, 3), 2))]
    sent(server, Load(concurrency=1, num_requests=2), sessions, "chat")
    first, second = (body["messages"] for body in server.bodies)
    assert first == [{"role": "user", "content": asked[0]}]
    assert second == [*first, {"role": "assistant", "content": " 0 1 2"}, {"role": "user", "content": asked[1]}]
    server.bodies.clear()
    records = sent(server, Load(rate=10, num_requests=2), multi_turn_sessions(Lengths(2, 3), 2), first_ms=20).records
    assert server.bodies[1]["prompt"] == f"{asked[0]}\n 0 1 2\n{asked[1]}"
    assert [record.turn for record in records if record.session == 0][:1] == [0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (429, "HTTP 429"),
        (500, "HTTP 500"),
        ("disconnect", "disconnected"),
        ("half an event", "unreadable stream"),
        ("bad json", "unreadable stream"),
        ("text in usage", "unreadable stream"),
        ("data after done", "unreadable stream"),
        ("error event", "error in the stream"),
        ("hang", "timeout"),
    ],
)
def test_what_goes_wrong_is_told_apart(server, fault, error):
    timeout_s = 0.5 if fault == "hang" else 10.0
    (record,) = sent(server, Load(concurrency=1, num_requests=1), timeout_s=timeout_s, fault=fault).records
    assert record.error == error and not record.ok
    if error == "HTTP 429":
        assert record.detail == "no room" and record.status == 429
    assert len(server.bodies) == 1  # nothing is sent again


def test_a_server_that_is_not_there(capsys):
    async def go():
        async with Client("http://127.0.0.1:9", "completions") as client:
            return await run_load(client, random_sessions(Lengths(5, 6)), Load(concurrency=1, num_requests=1),
                                  lambda turn, past: {})  # fmt: skip

    assert [record.error for record in asyncio.run(go()).records] == ["no connection"]
    assert main(["serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9/v1/models: ")


FAULTS = {
    429: "every request was answered",
    "disconnect": "every request was answered",
    "no done": "the stream ended with [DONE]",
    "no finish_reason": "a finish_reason came",
    "no usage": "usage came",
    "wrong sum": "prompt and completion tokens add up to the total",
    "lost prompt token": "prompt tokens are as many as were sent",
    "too few in usage": "no more chunks with text than tokens",
    "lost logprobs": "tokens with log-probabilities are as many as usage says",
    "too many in usage": "no more tokens than asked for",
    "one short": "what ended by length has its length",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_check_can_fail(capsys, server, fault):
    argv = ["--num-requests", "3", "--warmup", "0", "--count-logprobs", "--vocab-size", "50"]
    report = report_of(capsys, server, *argv, code=1, fault=fault)
    checks = {check["name"]: check for check in report["results"]["checks"]}
    assert set(FAULTS.values()) == set(checks)
    check = checks[FAULTS[fault]]
    assert check["num_failed"] == check["num_checked"] == 3 == len(check["examples"])
    errors = {429: {"HTTP 429": 3}, "disconnect": {"disconnected": 3}}.get(fault, {})
    assert report["results"]["requests"]["errors"] == errors


def test_ignore_eos_must_give_every_token(capsys, server):
    argv = ["--num-requests", "2", "--ignore-eos"]
    name = "as many tokens as asked for, since end-of-sequence is ignored"
    for code, fake in ((0, {"first_ms": 1}), (1, {"fault": "one short"})):
        report = report_of(capsys, server, *argv, code=code, **fake)
        (check,) = [check for check in report["results"]["checks"] if check["name"] == name]
        assert check["num_checked"] == 2 and check["num_failed"] == 2 * code
    assert server.bodies[-1]["ignore_eos"] is True


def test_the_report(capsys, server, tmp_path):
    picture = tmp_path / "run.svg"
    argv = ["--num-requests", "6", "--concurrency", "3", "--slo", "ttft:20ms", "tpot:5s", "--api-key", "secret"]
    report = report_of(capsys, server, *argv, "--plot", str(picture), first_ms=50, gap_ms=5)
    results = report["results"]
    assert report["environment"]["model"] == "fake-model" and "secret" not in json.dumps(report)
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert len(server.bodies) == 7  # one of them to warm up
    assert server.bodies[0]["prompt"] not in [body["prompt"] for body in server.bodies[1:]]
    assert results["requests"] == {"num": 6, "num_ok": 6, "errors": {}, "finish_reasons": {"length": 6}}
    assert results["num_output_tokens"] == 24 and results["num_prompt_tokens"] == 42
    assert results["output_tokens_per_s"] == pytest.approx(24 / results["duration_s"])
    assert results["requests_per_s"] == pytest.approx(6 / results["duration_s"])
    assert results["goodput"]["share"] == 0 and results["goodput"]["slo_s"] == {"ttft": 0.02, "tpot": 5}
    latency = results["latency"]
    assert latency["itl_s"]["num"] == 18 and latency["ttft_s"]["num"] == 6 and latency["ttft_s"]["p50"] > 0.05
    assert {"mean", "p50", "p90", "p95", "p99", "max", "num"} == set(latency["e2e_s"])
    client = results["client"]
    assert client["byte_to_stamp_s"]["num"] > 0 and client["loop_lag_s"]["p50"] < 0.05
    assert 0 < client["cpu_share_of_a_core"] < 1.5
    assert "</svg>" in picture.read_text()


def test_the_text(capsys, server):
    argv = ["serve", "--base-url", f"{server.url}/v1/", "--num-requests", "2", "--output-len", "3", "--slo", "e2e:9s"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "2 of 2 answered" in out and "6 output in 6 chunks" in out and "100.0% met e2e:9000ms" in out
    assert "usage came: 2 checked, ok" in out
    assert main([*argv, "--extra-body", '{"fake": {"fault": "no done"}}']) == 1
    out = capsys.readouterr().out
    assert "the stream ended with [DONE]: 2 checked, 2 FAILED\n    request 0.0: no [DONE]" in out


def test_allowed_statuses_are_no_failure(capsys, server):
    argv = ["--num-requests", "2", "--warmup", "0"]
    report = report_of(capsys, server, *argv, "--allow-status", "429,503", code=1, fault=429)  # nothing was measured
    assert all(check["num_failed"] == 0 for check in report["results"]["checks"])
    assert report["results"]["requests"]["errors"] == {"HTTP 429": 2}


def test_the_search_finds_where_the_slo_breaks(capsys, server):
    # One place and 40 ms a request: above 25/s the client's queue grows, and TTFT counts it.
    argv = ["--find-rate", "--rate", "10", "--arrivals", "fixed", "--concurrency", "1", "--num-requests", "15"]
    report = report_of(capsys, server, *argv, "--slo", "ttft:250ms", "--max-runs", "4", first_ms=40)
    search = report["results"]["search"]
    assert search["tries"][0] == {"rate": 10, "passed": True, "share": 1.0}
    assert 10 <= search["rate"] < 50 and search["failed_rate"] > search["rate"]
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies)


def test_prompts_of_ones_own(capsys, server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 2, "top_k": 5}\n\n{"prompt": [1, 2]}\n')
    report_of(capsys, server, "--jsonl", str(file), "--warmup", "0", "--concurrency", "1")
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("one", 2), ([1, 2], 4)]
    assert server.bodies[0]["top_k"] == 5 and server.bodies[0]["stream"] is True
    assert main(["serve", "--jsonl", str(file), "--input-len", "5"]) == 2
    assert "--jsonl brings its own prompts" in capsys.readouterr().err
    report_of(capsys, server, "--jsonl", str(file), "--num-requests", "5", "--warmup", "0")
    assert len(server.bodies) == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--base-url", "localhost:8000"], "must begin with http"),
        (["--arrivals", "fixed"], "fixed arrivals need a rate"),
        (["--arrivals", "burst", "--rate", "3"], "a burst sends all requests at once"),
        (["--burstiness", "2", "--rate", "3"], "burstiness belongs to gamma"),
        (["--rate", "0"], "rate=0.0: must be above 0"),
        (["--find-rate"], "--find-rate needs --slo"),
        (["--find-rate", "--slo", "ttft:5"], "with a unit"),
        (["--share", "0.5"], "belong to --find-rate"),
        (["--slo", "ttft:5s", "ttft:6s"], "two limits for one measure"),
        (["--turns", "3"], "--turns does not belong to these prompts"),
        (["--prompts", "multi-turn", "--turns", "0"], "--turns must be 1 or more"),
        (["--plot", "run.gif"], "must end with .svg, .png or .pdf"),
        (["--plot", "/no/such/run.png"], "there is no such folder"),
        (["--vocab-size", "9", "--endpoint", "chat"], "--vocab-size sends token ids"),
        (["--jsonl", "/no/such/file"], "No such file"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "stream is set by the load generator"),
        (["--allow-status", "200"], "must be numbers from 400 to 599"),
        (["--base-url", "http://x", "--server-args", "--seed 1"], "--server-args are for a server"),
    ],
)
def test_arguments_without_sense(capsys, argv, message):
    try:
        code = main(["serve", *argv])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_without_aiohttp(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # type: ignore[arg-type]
    assert main(["serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "needs aiohttp: pip install 'jaxinfer[bench]'" in capsys.readouterr().err


def test_urls():
    assert normalize_url("http://h:1") == normalize_url("http://h:1/v1/") == "http://h:1/v1"
