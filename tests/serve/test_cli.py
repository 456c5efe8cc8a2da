"""Flags, configuration files, and what keeps a server from starting."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxinfer.flags import UsageError
from jaxinfer.serve.cli import make_parser, parse

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "checkpoints" / "tiny-llama")
SMALL = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--batch-dir", "none"]


def test_flags_are_the_arguments_of_the_engine():
    import inspect

    from jaxinfer import LLM

    settings = parse([])
    known = inspect.signature(LLM.__init__).parameters
    assert set(settings.engine) <= set(known)
    left_out = {"self", "model", "params", "verbose"}
    assert set(known) - set(settings.engine) == left_out, "each setting of the engine has a flag"
    differing = {name for name, value in settings.engine.items() if value != known[name].default}
    assert differing == set(), "the defaults are the engine's"


def test_a_file_sets_flags_and_the_command_line_goes_first(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-model-len: 512\nmax_num_seqs: 8\nenable-prefix-caching: false\nserved-model-name: [a, b]\n"
        "tenant-weights: {ann: 2}\nmax-body-size: 2M\nhost: 127.0.0.2\napi-key: ann:k1\n"
    )
    settings = parse(["--config", str(file), "--max-num-seqs", "4"])
    assert (settings.engine["max_model_len"], settings.engine["max_num_seqs"]) == (512, 4)
    assert settings.engine["enable_prefix_caching"] is False and settings.model_names == ("a", "b")
    assert settings.engine["tenant_weights"] == {"ann": 2}
    assert (settings.server.max_body_bytes, settings.server.host) == (2 << 20, "127.0.0.2")
    assert settings.server.api_keys == {"k1": "ann"}


def test_logits_processors_are_named_by_their_places(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "two_of_serve.py").write_text("from jaxinfer import LogitsProcessor\nP = LogitsProcessor('p', max)\n")
    (found,) = parse(["--logits-processors", "two_of_serve:P"]).engine["logits_processors"]
    assert found.name == "p"


def test_every_flag_may_stand_in_a_file(tmp_path, monkeypatch):
    """What a flag takes on the command line, a line of the file takes too."""
    own = {"log_level": "info", "log_format": "json", "pooling": "last", "tenant_weights": {"ann": 2}}
    own |= {"tool_call_parser": "hermes", "reasoning_parser": "none"}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_serve.py").write_text("from jaxinfer import LogitsProcessor\nP = LogitsProcessor('p', max)\n")
    own |= {"logits_processors": ["of_serve:P"]}
    file = tmp_path / "serve.yaml"
    for action in make_parser()._actions:
        if action.dest in ("help", "config", "api_key_file", "chat_template", "ssl_keyfile", "ssl_certfile"):
            continue
        value = own.get(action.dest, True if isinstance(action, argparse.BooleanOptionalAction) else "4")
        file.write_text(json.dumps({action.option_strings[0].removeprefix("--"): value}))
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "port=70000"),
        (["--port", "x"], "--port"),
        (["--max-model-len", "long"], "--max-model-len"),
        (["--max-queue-len", "0"], "max_queue_len=0"),
        (["--drain-timeout", "-1"], "drain_timeout_s"),
        (["--ssl-keyfile", "k.pem"], "ssl_certfile"),
        (["--api-key", "two words"], "one word"),
        (["--api-key", "a:k", "b:k"], "twice"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--chat-template", "/no/such/file"], "/no/such/file"),
        (["--max-body-size", "8Q"], "no size"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--logits-processors", "no_such_module:P"], "no_such_module"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_refused_by_name(flags, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(flags)


def test_keys_come_from_flags_and_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nann:k1\n\nk2\n")
    keys = parse(["--api-key", "bob:k3", "--api-key-file", str(file)]).server.api_keys
    assert keys == {"k3": "bob", "k1": "ann", "k2": "key-2"}
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="no key"):
        parse(["--api-key-file", str(file)])


def start(*flags):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxinfer.serve", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def failure(*flags):
    process = start(*flags)
    out, errors = process.communicate(timeout=120)
    assert process.returncode in (1, 2) and out == ""
    lines = errors.splitlines()
    assert "Traceback" not in errors
    return lines[-1]


def test_what_keeps_it_from_starting_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = failure("--model", TINY, "--port", port)
        assert line.startswith(f"error: 127.0.0.1:{port}: ") and "--port" in line
    line = failure("--model", "/no/such/model", "--port", "0")
    assert line.startswith("error: ") and "/no/such/model" in line


@pytest.mark.slow
def test_too_little_memory_is_one_line_with_the_numbers():
    line = failure("--model", TINY, "--port", "0", "--num-pages", "1000000000")
    assert line.startswith("error: ") and "num_pages" in line


def test_a_life_from_start_to_drain(tmp_path):
    process = start("--model", TINY, "--port", "0", "--served-model-name", "mine", "--drain-timeout", "100", *SMALL)
    try:
        lines = []
        while not lines or "ready at" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        url = lines[-1].split("ready at ")[1].strip()
        log = "".join(lines)
        assert "model: " in log and "memory plan" in log and "weights" in log
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            body = {"prompt": "a", "max_tokens": 50, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                events = answer.iter_lines()
                first = next(events)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in events if line]
        assert json.loads(first.removeprefix("data: "))["choices"]
        assert rest[-1] == "data: [DONE]", "what ran was finished"
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    process = start("--model", TINY, "--port", "0", "--drain-timeout", "60", *SMALL)
    try:
        while "ready at" not in (line := process.stderr.readline()):
            assert line
        url = line.split("ready at ")[1].strip()
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"prompt": ["a"] * 8, "max_tokens": 60, "stream": True, "ignore_eos": True, "n": 30}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # dropped, it would close the connection
                next(lines)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
                process.send_signal(signal.SIGTERM)
                begin = time.monotonic()
                code = process.wait(120)
        assert code == 1 and time.monotonic() - begin < 60
    finally:
        process.kill()
        process.communicate()
