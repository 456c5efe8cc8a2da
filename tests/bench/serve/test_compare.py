"""The comparison's arithmetic on runs that are made up, the processes it starts, and (slow) the whole of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from jaxinfer.bench.__main__ import main
from jaxinfer.bench.serve import compare
from jaxinfer.bench.serve.overhead import OverheadMonitor, overhead_warnings
from jaxinfer.bench.serve.plot import running_at, tokens_over_time
from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.run import Run
from jaxinfer.bench.serve.server import ChildServer


def answered(session: int, due_s: float, first_s: float, last_s: float, text: str = "a b c") -> Record:
    times = [first_s, (first_s + last_s) / 2, last_s]
    counts = {"prompt_tokens": 4, "output_tokens": 3, "total_tokens": 7, "requested_tokens": 3}
    return Record(session, 0, due_s, first_s=first_s, last_s=last_s, text_s=times, text=text, done=True,
                  finish_reason="length", status=200, **counts)  # fmt: skip


def test_the_figures_of_a_comparison():
    found = compare._Found()
    # In another order than they were sent in, as they may finish.
    many = Run([answered(1, 0.0, 0.5, 1.0, "two"), answered(0, 0.0, 0.5, 1.0, "one")], 2.0, OverheadMonitor())
    single = Run([answered(0, 0.0, 0.104, 0.208), answered(1, 1.0, 1.106, 1.210)], 2.0, OverheadMonitor())
    other = {"output_tokens_per_s": 4.0, "cpu_s_per_token": 0.3, "texts": ["one", "TWO"]}
    compare._note(found, (many, single, 1.2), (other, {"ttft_s": [0.1, 0.1], "tpot_s": [0.05, 0.051]}))
    results, targets = compare._report(found)
    figures = results["comparison"]
    assert figures["output_tokens_per_s"]["server"]["median"] == 3.0
    assert figures["output_tokens_per_s"]["ratio"]["median"] == 0.75
    assert figures["cpu_s_per_output_token"]["server"]["median"] == pytest.approx(0.2)
    assert figures["same_texts"] == {"num_compared": 2, "num_same": 1}
    single_s = figures["one_at_a_time"]
    assert single_s["difference.ttft_s"]["median"] == pytest.approx(0.005)
    assert single_s["difference.tpot_s"]["median"] == pytest.approx(0.0015)
    assert [(each["name"], each["met"]) for each in targets] == [
        ("throughput ratio", False),
        ("difference of ttft_s", False),
        ("difference of tpot_s", True),
    ]
    assert all(check["num_failed"] == 0 for check in results["checks"])


READY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(200 if Handler.count > 2 and self.path == "/ready" else 503)
        self.end_headers()
assert sys.argv[1:4:2] == ["--host", "--port"] and sys.argv[5:] == ["--seed", "3"], sys.argv
http.server.HTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()
"""


def test_a_child_is_ready_when_entered_and_gone_when_left():
    with ChildServer(["--seed", "3"], [sys.executable, "-c", READY]) as server:
        assert urllib.request.urlopen(f"{server.base_url}/ready").status == 200
        server.wait_until_idle()
        pid, cpu_s = server._process.pid, server.cpu_s()
        assert cpu_s is None or 0 <= cpu_s < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert server._process.returncode == -signal.SIGTERM


def test_a_signal_ends_the_child_too():
    code = f"""
from pathlib import Path
import sys, time
from jaxinfer.bench.serve.server import ChildServer, ended_by_signals
with ended_by_signals(), ChildServer(["--seed", "3"], [sys.executable, "-c", {READY!r}]) as server:
    print(server._process.pid, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_cannot_start():
    code = "import sys; print('loading'); sys.exit('error: no such model')"
    with (
        pytest.raises(RuntimeError, match="ended with 1 before it was ready: error: no such model"),
        ChildServer([], [sys.executable, "-c", code]),
    ):
        pass


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--base-url", "http://x"], "--base-url does not belong to --compare-in-process"),
        (["--rate", "3"], "--rate does not belong"),
        (["--slo", "ttft:5s"], "--slo does not belong"),
        (["--repeats", "0"], "--repeats must be 1 or more"),
    ],
)
def test_what_a_comparison_does_not_take(capsys, argv, message):
    assert main(["serve", "--compare-in-process", *argv]) == 2
    assert message in capsys.readouterr().err
    assert main(["serve", "--repeats", "2", "--base-url", "http://x"]) == 2
    assert "belong to --compare-in-process" in capsys.readouterr().err


def test_a_busy_client_is_warned_of():
    late = {"p99": 0.02}
    calm = {"schedule_slip_s": {"p99": 1e-3}, "loop_lag_s": None, "byte_to_stamp_s": {"p99": 1e-4}}
    assert overhead_warnings({**calm, "cpu_share_of_a_core": 0.2}, [0.1], [0.01]) == []
    assert "used 90% of a core" in overhead_warnings({**calm, "cpu_share_of_a_core": 0.9}, [0.1], [0.01])[0]
    busy = {"schedule_slip_s": late, "loop_lag_s": late, "byte_to_stamp_s": late, "cpu_share_of_a_core": 0.2}
    found = overhead_warnings(busy, [0.1], [0.05])
    assert [line.split(" by ")[0] for line in found] == [
        "the client was late to send",
        "the client was late to wake",
        "the client was late to see bytes",
    ]
    assert overhead_warnings(busy, [0.3], [0.3]) == []  # late, but little beside what is measured
    assert overhead_warnings(busy, [], []) == []


def test_the_timeline_holds_every_token():
    records = [answered(0, 0.0, 1.0, 3.0), answered(1, 2.0, 2.5, 4.0)]
    assert tokens_over_time(records, 4.0, 4) == [0, 1, 2, 3]
    assert running_at(records, [0.0, 1.9, 2.0, 3.5, 4.0]) == [1, 1, 2, 1, 0]


@pytest.mark.full
def test_the_comparison_of_a_tiny_model(capsys, tiny_model_path):
    pytest.importorskip("aiohttp")
    sizes = ["--input-len", "6", "--output-len", "5", "--vocab-size", "90", "--concurrency", "4", "--num-requests", "6"]
    argv = ["serve", "--compare-in-process", "--model", str(tiny_model_path), *sizes, "--repeats", "2", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    figures = report["results"]["comparison"]
    assert figures["same_texts"] == {"num_compared": 12, "num_same": 12}
    assert figures["output_tokens_per_s"]["ratio"]["num"] == 2
    assert report["settings"]["num_requests"] == 6 and "slo" not in report["settings"]
    assert [check["num_failed"] for check in report["results"]["checks"]] == [0] * len(report["results"]["checks"])
