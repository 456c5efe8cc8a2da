"""Under load and abuse: full queues, clients that leave or stop reading, keys, sizes, failing steps, the end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from tests.serve.waiting import wait_until

LONG = {"prompt": "once", "max_tokens": 200, "ignore_eos": True}


@contextmanager
def held_steps(engine):
    """Steps wait for the event that this gives."""
    inner = engine._llm.engine
    step, go = inner.step, threading.Event()

    def held():
        assert go.wait(120)
        return step()

    inner.step = held
    try:
        yield go
    finally:
        go.set()
        del inner.step


def test_a_full_server_says_when_to_come_back(engine, serving):
    with serving(max_queue_len=2) as found, ThreadPoolExecutor(8) as pool:  # 4 run, 2 wait
        with held_steps(engine) as go:
            admission = found.server.admission
            running = [pool.submit(found.post, "/v1/completions", {**LONG, "n": 2}) for _ in range(3)]
            wait_until(lambda: admission.num_sequences == 6)
            refused = found.post("/v1/completions", LONG)
            error = refused.json()["error"]
            assert refused.status_code == 429 and error["code"] == "overloaded" and "6 of 6" in error["message"]
            assert int(refused.headers["retry-after"]) >= 1
            go.set()
            assert [each.result().status_code for each in running] == [200] * 3
        assert found.post("/v1/completions", LONG).status_code == 200
        too_many = found.post("/v1/completions", {**LONG, "n": 7})
        assert too_many.status_code == 400 and "at most 6" in too_many.json()["error"]["message"]


def test_one_tenant_cannot_take_every_place(engine, serving):
    with serving(max_requests_per_tenant=1) as found, ThreadPoolExecutor(4) as pool, held_steps(engine) as go:
        running = pool.submit(found.post, "/v1/completions", {**LONG, "user": "ann"})
        wait_until(lambda: found.server.admission.num_requests == 1)
        refused = found.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "user": "ann"})
        assert refused.status_code == 429 and "'ann' has 1" in refused.json()["error"]["message"]
        other = pool.submit(found.post, "/v1/completions", {**LONG, "user": "bob"})
        wait_until(lambda: found.server.admission.num_requests == 2)
        go.set()
        assert (running.result().status_code, other.result().status_code) == (200, 200)


def send(found, body, path="/v1/completions", receive_buffer_bytes=None):
    """A request over a socket of its own, which the test may drop."""
    raw = json.dumps(body).encode()
    client = socket.socket()
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.connect(("127.0.0.1", int(found.url.rsplit(":", 1)[1])))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages_within_a_step(engine, served, stream):
    inner = engine._llm.engine
    steps_after, gone = [], threading.Event()
    step = inner.step

    def counted():
        moved = step()
        if gone.is_set():
            steps_after.append(inner.stats()["pages_used"])
        time.sleep(0.02)
        return moved

    inner.step = counted
    try:
        client = send(served, {**LONG, "n": 2, "stream": stream})
        wait_until(lambda: engine.stats()["num_running"] == 2)
        client.close()
        wait_until(lambda: served.server.admission.num_requests == 0)  # the server has noticed, the engine was told
        gone.set()
        wait_until(lambda: engine.stats()["pages_used"] == 0)
        assert len(steps_after) <= 1, "the engine went on with a request whose client had left"
    finally:
        del inner.step


def test_a_client_that_does_not_read_is_dropped(engine, serving):
    with serving(stream_timeout_s=0.3) as found:
        body = {"prompt": "x", "max_tokens": 250, "n": 4, "ignore_eos": True, "stream": True, "logprobs": 20}
        found.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections to come
        client = send(found, body, receive_buffer_bytes=1024)  # the answer is more than a connection holds
        wait_until(lambda: found.server.admission.num_requests == 1)
        wait_until(lambda: found.server.admission.num_requests == 0, 60)
        client.settimeout(20)
        received = b""
        while part := client.recv(1 << 20):
            received += part
        client.close()
        assert b"[DONE]" not in received


def test_keys_let_in_and_say_who_asks(engine, serving):
    with serving(api_keys={"s3cret": "ann", "other": "bob"}) as found:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}, {"x-api-key": ""}):
            answer = found.post("/v1/completions", {"prompt": "x"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for headers in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "other"}):
            assert found.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 200
            assert found.get("/v1/models", headers=headers).status_code == 200
        assert [found.get(path).status_code for path in ("/health", "/ready", "/version")] == [200] * 3
        assert found.get("/v1/models").status_code == 401 and found.get("/openapi.json").status_code == 401
        with held_steps(engine) as go, ThreadPoolExecutor(1) as pool:
            asked = {**LONG, "user": "somebody else"}
            running = pool.submit(found.post, "/v1/completions", asked, headers={"x-api-key": "s3cret"})
            wait_until(lambda: found.server.admission.num_requests == 1)
            assert list(found.server.admission._requests_of) == ["ann"], "who asks is the key's owner"
            go.set()
            assert running.result().status_code == 200


def test_bodies_beyond_the_limit_are_refused(served, serving, engine):
    with serving(max_body_bytes=1000) as found:
        answer = found.post("/v1/completions", {"prompt": "x" * 1000})
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]
        chunks = (b"x" * 100 for _ in range(50))  # no declared length
        answer = found.http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert found.post("/v1/completions", {"prompt": "x" * 100}).status_code == 200


def test_who_sends_too_much_reads_the_answer(served):
    """A connection that is closed while a body comes is reset, and the answer may be lost with it."""
    body = b" " * (9 << 20)
    for _ in range(8):
        client = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), 20)
        with client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            client.sendall(body)
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_who_would_send_far_too_much_is_cut_off(served):
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), 20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 10**12)
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_other_pages_are_kept_out_unless_allowed(served, serving, engine):
    origin = {"Origin": "https://page.example"}
    assert "access-control-allow-origin" not in served.get("/v1/models", headers=origin).headers
    with serving(allowed_origins=("https://page.example",), api_keys={"k": "k"}) as found:
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        preflight = found.http.options("/v1/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        refused = found.get("/v1/models", headers={"Origin": "https://other.example", "x-api-key": "k"})
        assert "access-control-allow-origin" not in refused.headers


def test_a_request_timeout_ends_with_what_there_is(engine, serving):
    with serving(request_timeout_s=0.1) as found:
        (choice,) = found.post("/v1/completions", {**LONG, "timeout_s": 100}).json()["choices"]
        assert choice["finish_reason"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_a_500_and_the_server_goes_on(engine, served, stream, monkeypatch):
    inner, calls = engine._llm.engine, []
    before = served.get("/health").json()["num_failed_steps"]

    def failing(*values, **named):
        calls.append(1)
        raise RuntimeError("a secret of the device")

    with monkeypatch.context() as patch:
        patch.setattr(inner.runner, "run", failing)
        answer = served.post("/v1/completions", {"prompt": "x", "stream": stream})
    if stream:
        assert answer.status_code == 200
        error = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert error["type"] == "server_error" and "secret" not in answer.text
    assert len(calls) == 2, "together with others, then alone"
    health = served.get("/health")
    assert health.status_code == 200 and health.json()["num_failed_steps"] == before + 2
    assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_drain_finishes_what_runs_and_takes_no_more(engine, serving):
    with serving() as found, ThreadPoolExecutor(4) as pool:
        with held_steps(engine) as go:
            running = [pool.submit(found.post, "/v1/completions", {**LONG, "stream": s}) for s in (False, True)]
            wait_until(lambda: found.server.admission.num_requests == 2)
            found.loop.call_soon_threadsafe(found.uvicorn_server.end, "test")
            wait_until(lambda: found.server.admission.draining)
            ready, refused = found.get("/ready"), found.post("/v1/completions", LONG)
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert found.get("/health").status_code == 200
            go.set()
            whole, streamed = (each.result() for each in running)
        assert whole.json()["usage"]["completion_tokens"] == 200
        assert streamed.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in streamed.text
        wait_until(lambda: not found.uvicorn_server.started or found.uvicorn_server.should_exit)
        assert found.uvicorn_server.exit_code == 0


def test_a_drain_that_takes_too_long_gives_what_there_is(engine, serving):
    with serving(drain_timeout_s=0.3) as found, ThreadPoolExecutor(1) as pool:
        inner, step = engine._llm.engine, engine._llm.engine.step
        inner.step = lambda: (time.sleep(0.05), step())[1]
        try:
            running = pool.submit(found.post, "/v1/completions", LONG)
            wait_until(lambda: engine.stats()["num_running"] == 1)
            time.sleep(0.3)
            found.loop.call_soon_threadsafe(found.uvicorn_server.end, "test")
            answer = running.result().json()
        finally:
            del inner.step
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "abort" and 0 < answer["usage"]["completion_tokens"] < 200


def test_the_event_loop_is_free_while_long_texts_are_encoded(served):
    """A text that takes the tokenizer long does not keep others waiting."""
    encoding = threading.Event()
    release = threading.Event()
    tokenizer = served.server.tokenizer
    encode = type(tokenizer).encode

    def slow(self, text, *values):
        if text == "slow":
            encoding.set()
            assert release.wait(120)
        return encode(self, text, *values)

    type(tokenizer).encode = slow
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(served.post, "/v1/completions", {"prompt": "slow", "max_tokens": 1})
            assert encoding.wait(60)
            assert served.get("/health").status_code == 200
            release.set()
            assert running.result().status_code == 200
    finally:
        type(tokenizer).encode = encode


def test_cancelled_requests_leave_no_place_taken(served):
    async def main():
        import httpx

        async with httpx.AsyncClient(base_url=served.url) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    wait_until(lambda: served.server.admission.num_sequences == 0)
    assert served.server._running == set()


def test_an_internal_error_is_a_500_and_the_connection_goes_on(served, monkeypatch):
    def failing(output):
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr("jaxinfer.serve.server.checked", failing)
        answer = served.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text and answer.headers.get("connection") != "close"
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as client:
        client.settimeout(20)
        for patched in (True, False):  # two requests over one connection
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr("jaxinfer.serve.server.checked", failing)
                raw = b'{"prompt": "x", "max_tokens": 1}'
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
                received = client.recv(1 << 16)
                assert received.startswith(b"HTTP/1.1 500" if patched else b"HTTP/1.1 200")
                while b"}" not in received:
                    received += client.recv(1 << 16)


def repeated(text, num):
    return ",".join([str(text)] * num)


TEXT = '"a"'
HOSTILE = {
    "prompts of a wrong type": f'{{"prompt":[{repeated(1.5, 400_000)}]}}',
    "too many texts": f'{{"prompt":[{repeated(TEXT, 400_000)}]}}',
    "too many values": f'{{"prompt":[{repeated(1, 1_100_000)}]}}',
    "too many lists": json.dumps({"prompt": [[]] * 300_000}),
    "unknown keys": json.dumps({"prompt": "a", **{f"k{number}": 1 for number in range(200_000)}}),
    "biases of a wrong type": json.dumps({"prompt": "a", "logit_bias": {f"{token}": [] for token in range(100_000)}}),
    "many stop strings": f'{{"prompt":"a","stop":[{repeated(TEXT, 300_000)}]}}',
    "many bad words": f'{{"prompt":"a","bad_words":[{repeated(TEXT, 300_000)}]}}',
    "a long bad word": json.dumps({"prompt": "a", "bad_words": ["w" * 1_000_000]}),
    "a long user": json.dumps({"prompt": "a", "user": "u" * 1_000_000}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bodies_that_take_long_to_read_are_refused_at_once(served, name):
    begin_s = time.process_time()
    found = served.http.post("/v1/completions", content=HOSTILE[name], headers={"content-type": "application/json"})
    assert found.status_code in (400, 413), found.text
    # An error for each wrong value would take tens of seconds, all of them on the event loop.
    assert time.process_time() - begin_s < 2
    assert len(found.text) < 3000


@pytest.mark.parametrize("body", ["9" * 5000, "[" * 100_000, "\xff"])
def test_what_is_no_readable_json_is_said_so(served, body):
    found = served.http.post(
        "/v1/completions", content=body.encode("latin-1"), headers={"content-type": "application/json"}
    )
    assert found.status_code == 400 and "cannot be read" in found.json()["error"]["message"]


def test_texts_are_counted_before_they_are_encoded(served):
    begin_s = time.process_time()
    found = served.post("/v1/score", {"text_1": "a", "text_2": ["b"] * 100_000})
    assert found.status_code == 400 and "100001 texts" in found.json()["error"]["message"]
    found = served.post("/tokenize", {"prompt": "ab" * 200_000})
    assert found.status_code == 400 and "tokens" in found.json()["error"]["message"]
    assert time.process_time() - begin_s < 3


def test_a_template_variable_names_no_argument_of_ours(served):
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"self": 1}}
    error = served.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "chat_template_kwargs.self" and "Tokenizer" not in error["message"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_forms_of_other_pages_store_nothing(served, serving, site):
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    headers = {"Origin": "https://evil.example", "Sec-Fetch-Site": site}
    refused = served.http.post("/v1/files", headers=headers, **form)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
    own = served.http.post("/tokenize", headers={"Sec-Fetch-Site": "same-origin"}, json={"prompt": "a"})
    assert own.status_code == 200
    with serving(allowed_origins=("https://evil.example",)) as found:
        assert found.http.post("/tokenize", headers=headers, json={"prompt": "a"}).status_code == 200


def test_a_page_whose_name_was_made_to_mean_this_machine_is_kept_out(served, serving):
    same = {"Sec-Fetch-Site": "same-origin"}
    port = served.url.rsplit(":", 1)[1]
    for path in ("/status", "/v1/models"):
        refused = served.get(path, headers={**same, "Host": f"page.example:{port}"})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert served.get(path, headers={**same, "Host": host}).status_code == 200
        assert served.get(path, headers={"Host": "behind.a.proxy"}).status_code == 200, "no browser asks"
    with serving(allowed_origins=("http://page.example",)) as found:
        assert found.get("/v1/models", headers={**same, "Host": "page.example"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_followed_to_its_end_is_the_requests_own_fault(served, monkeypatch, stream):
    body = {"prompt": "x", "guided_regex": "[ab]{9}c", "max_tokens": 12, "stream": stream}
    assert served.post("/v1/completions", body).status_code == 200  # compiled now
    with monkeypatch.context() as patch:
        patch.setattr("jaxinfer.structured.grammar._compute_mask", lambda *_: (np.zeros(9, np.uint32), "too complex"))
        answer = served.post("/v1/completions", body)
    text = answer.text.split("\n\n")[-2 if stream else 0].removeprefix("data: ")
    error = json.loads(text)["error"]
    assert "too complex" in error["message"] and error["type"] == "invalid_request_error"
    assert stream or answer.status_code == 400
