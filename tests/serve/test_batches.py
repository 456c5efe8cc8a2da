"""Batches through the OpenAI client: equal to online answers, below online requests, and whole after a restart."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxinfer.jobs.journal import groups
from jaxinfer.serve.batch_state import WINDOW_S
from jaxinfer.serve.server import MAX_PRIORITY, OFFLINE_PRIORITY
from tests.serve.conftest import TINY, Running, running

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 3, "n": 2}
EMBEDDING = {"model": "tiny", "input": ["one", "two"], "encoding_format": "base64"}
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def keeping(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engine, batch_dir=tmp_path_factory.mktemp("store")) as found:
        yield found


def line(custom_id: str, body: Any, url: str = "/v1/completions", **other: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **other})


def create(client: Any, lines: list[str], endpoint: str = "/v1/completions", **other: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **other)


def ended(client: Any, batch: Any, timeout_s: float = 60) -> Any:
    """The batch once it has ended."""
    end_s = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
    return batch


def lines_of(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def run(client: Any, lines: list[str], endpoint: str = "/v1/completions", **other: Any) -> tuple[Any, list, list]:
    """A batch with the lines of its output and error files."""
    batch = ended(client, create(client, lines, endpoint, **other))
    return batch, lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """An answer without what differs each time."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", *names)}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/embeddings", EMBEDDING)],
)
def test_answers_are_those_of_online_requests(keeping, endpoint, body):
    client = keeping.openai()
    lines = [line(f"request-{number}", body, endpoint) for number in range(3)]
    batch, output, errors = run(client, lines, endpoint, metadata={"job": "nightly"})
    assert batch.status == "completed" and errors == [] and batch.error_file_id is None and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
    assert batch.metadata == {"job": "nightly"} and batch.endpoint == endpoint
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert [each["custom_id"] for each in output] == ["request-0", "request-1", "request-2"]
    online = keeping.post(endpoint, body).json()
    for each in output:
        response = each["response"]
        assert each["error"] is None and response["status_code"] == 200 and response["request_id"]
        usage = response["body"]["usage"]
        assert usage["prompt_tokens"] == online["usage"]["prompt_tokens"]
        assert without(response["body"], "usage") == without(online, "usage")
    file = client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.filename == f"{batch.id}_output.jsonl"


def test_bad_lines_are_errors_with_their_number(keeping):
    lines = [
        line("good", COMPLETION),
        "{broken",
        line("good", COMPLETION),
        "",
        line("other url", COMPLETION, "/v1/embeddings"),
        line("get", COMPLETION, method="GET"),
        line("unknown field", {**COMPLETION, "max_tokenz": 1}),
        line("other model", {**COMPLETION, "model": "other"}),
        line("stream", {**COMPLETION, "stream": True}),
        line("priority", {**COMPLETION, "priority": MAX_PRIORITY + 1}),
        line("last", COMPLETION),
    ]
    batch, output, errors = run(keeping.openai(), lines)
    assert batch.status == "completed" and [each["custom_id"] for each in output] == ["good", "last"]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (10, 2, 8)
    unread, unanswered = errors[:4], errors[4:]
    assert [each["error"]["line"] for each in unread] == [2, 3, 5, 6]
    assert [each["error"]["param"] for each in unread] == [None, "custom_id", "url", "method"]
    assert all(each["error"]["code"] == "invalid_line" and each["response"] is None for each in unread)
    assert "line 2 is not JSON" in unread[0]["error"]["message"]
    assert [each["custom_id"] for each in unanswered] == ["unknown field", "other model", "stream", "priority"]
    assert [each["response"]["body"]["error"]["param"] for each in unanswered] == [
        "max_tokenz", "model", "stream", "priority",
    ]  # fmt: skip
    for each, number in zip(unanswered, (6, 7, None, 9), strict=True):
        if number is not None:
            online = keeping.post("/v1/completions", json.loads(lines[number])["body"])
            response = each["response"]
            assert (response["status_code"], response["body"]) == (online.status_code, online.json())


def test_a_line_that_is_nested_too_deep_is_its_own_error(keeping):
    head = '{"custom_id":"deep","method":"POST","url":"/v1/completions","body":{"prompt":'
    lines = [head + "[" * depth + "]" * depth + "}}" for depth in (300, 960, 20_000)]
    batch, output, errors = run(keeping.openai(), [*lines, line("good", COMPLETION)])
    assert batch.status == "completed" and len(output) == 1 and len(errors) == 3


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint", "/v1/embeddings"),
        ({"completion_window": "48h"}, "completion_window", "24h"),
        ({"input_file_id": "../lock"}, "input_file_id", "no file"),
        ({"input_file_id": None}, "input_file_id", "string"),
        ({"metadata": {"a": 5}}, "metadata.a", "string"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, "metadata", "16"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds", "3600"),
        ({"model": "tiny"}, "model", "no such field"),
    ],
)
def test_bad_bodies_are_refused_by_name(keeping, change, param, words):
    file = keeping.openai().files.create(file=("x", b"x"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **change}
    answer = keeping.post("/v1/batches", body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and words in error["message"], error


def test_files_without_requests_fail_and_results_are_no_input(keeping):
    client = keeping.openai()
    batch = ended(client, create(client, ["", "  "]))
    assert batch.status == "failed" and batch.failed_at and batch.errors.data[0].code == "empty_file"
    done, *_ = run(client, [line("a", COMPLETION)])
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=done.output_file_id, endpoint="/v1/completions", completion_window="24h")


def test_batches_are_listed_and_cannot_be_guessed(keeping):
    client = keeping.openai()
    ids = [create(client, [line("a", COMPLETION)]).id for _ in range(3)]
    listed = client.batches.list(limit=2)
    assert [batch.id for batch in listed.data] == [ids[2], ids[1]] and listed.has_more
    assert [batch.id for batch in client.batches.list(limit=2)][2] == ids[0]
    for batch_id in ids:
        ended(client, client.batches.retrieve(batch_id))
    for wrong in ("..", "..%2f..%2flock", "batch_" + "0" * 32, "%00"):
        assert keeping.get(f"/v1/batches/{wrong}").status_code == 404
        assert keeping.post(f"/v1/batches/{wrong}/cancel").status_code == 404
    with pytest.raises(openai.ConflictError, match="completed already"):
        client.batches.cancel(ids[0])


def test_cancelling_keeps_what_is_done_and_frees_what_runs(keeping, engine):
    client = keeping.openai()
    long = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
    lines = [line(f"{number}", COMPLETION if number < 4 else long) for number in range(40)]
    batch = create(client, lines)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    while client.batches.retrieve(batch.id).request_counts.completed < 4:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert [each["custom_id"] for each in output[:4]] == ["0", "1", "2", "3"]
    assert len(output) + len(errors) == 40 and len(errors) > 20
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert not engine.stats()["num_running"]
    client.files.delete(batch.input_file_id)


def test_a_batch_ends_with_its_window(keeping, monkeypatch):
    client = keeping.openai()
    long = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
    monkeypatch.setattr("jaxinfer.serve.batch_state.WINDOW_S", 1)
    batch = ended(client, create(client, [line(f"{number}", long) for number in range(60)]))
    assert WINDOW_S == 24 * 3600 and batch.status == "expired" and batch.expired_at
    errors = lines_of(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"} and len(errors) > 20
    assert batch.request_counts.completed == len(lines_of(client, batch.output_file_id)) == 60 - len(errors)


def test_online_requests_go_before_a_batch(keeping, engine):
    client = keeping.openai()
    long = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
    batch = create(client, [line(f"{number}", long) for number in range(200)])
    while engine.stats()["num_running"] < engine.max_num_seqs:
        time.sleep(0.01)
    before = engine.stats()["num_preemptions"]
    body = {**COMPLETION, "max_tokens": 30, "ignore_eos": True, "priority": MAX_PRIORITY}
    for _ in range(3):
        assert keeping.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 30
    assert engine.stats()["num_preemptions"] > before, "a row of the batch gave way"
    completed = client.batches.retrieve(batch.id).request_counts.completed
    assert completed < 100, "three times 30 tokens did not wait for 100 times 200"
    # As many online requests as there are rows: no line of the batch begins meanwhile.
    threads = [
        threading.Thread(target=keeping.post, args=("/v1/completions", {**body, "max_tokens": 100})) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = client.batches.retrieve(batch.id).request_counts.completed
    assert after - completed <= 2 * engine.max_num_seqs, "8 requests of 100 tokens ran while so few of the batch did"
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"


def test_priorities_of_online_requests_are_far_from_those_of_batches(keeping):
    assert OFFLINE_PRIORITY - MAX_PRIORITY > MAX_PRIORITY
    for priority in (MAX_PRIORITY + 1, -MAX_PRIORITY - 1, OFFLINE_PRIORITY):
        answer = keeping.post("/v1/completions", {**COMPLETION, "priority": priority})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"


def test_a_batch_goes_on_after_a_restart_and_commits_each_line_once(engine, tmp_path):
    lines = [line(f"{number}", {**COMPLETION, "prompt": f"text {number}", "max_tokens": 20}) for number in range(24)]
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        batch = create(client, lines)
        while client.batches.retrieve(batch.id).request_counts.completed < 5:
            time.sleep(0.01)
    folder = tmp_path / "batches" / batch.id
    first = [record for _, group in groups(folder / "journal") for record in group]
    assert 5 <= len(first) < 24
    with open(folder / "journal", "ab") as file:
        file.write(b"0badf00d 100 [{")  # as a crash in an append leaves it
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        batch = ended(client, batch)
        output = lines_of(client, batch.output_file_id)
        assert batch.status == "completed" and batch.request_counts.completed == 24
        assert [each["custom_id"] for each in output] == [f"{number}" for number in range(24)]
        assert {each["id"] for each in output} >= {record["told"]["id"] for record in first}, "none was run again"
        online = server.post("/v1/completions", {**COMPLETION, "prompt": "text 23", "max_tokens": 20}).json()
        assert output[23]["response"]["body"]["choices"] == online["choices"]
    assert not (folder / "journal").exists()
    with running(engine, batch_dir=tmp_path) as server:
        assert server.openai().batches.retrieve(batch.id) == batch
        assert lines_of(server.openai(), batch.output_file_id) == output


def test_a_crash_while_results_are_written_makes_no_second_file(engine, tmp_path):
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        batch, output, _ = run(client, [line(f"{number}", COMPLETION) for number in range(3)])
    # The state before the last save: the files are there, and the batch has not been told to be done.
    state = tmp_path / "batches" / batch.id / "batch.json"
    saved = json.loads(state.read_text())
    state.write_text(json.dumps({**saved, "status": "finalizing", "has_output": False}))
    from jaxinfer.jobs.journal import Journal

    journal = Journal(state.with_name("journal"))
    for index, each in enumerate(output):
        journal.append([{"index": index, "good": True, "told": each}])
    journal.close()
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        again = ended(client, batch)
        assert again.output_file_id == batch.output_file_id
        assert lines_of(client, again.output_file_id) == output
        assert len(client.files.list().data) == 2


def test_draining_begins_no_line_and_loses_none(engine, tmp_path):
    long = {**COMPLETION, "max_tokens": 30, "ignore_eos": True}
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        batch = create(client, [line(f"{number}", long) for number in range(16)])
        while client.batches.retrieve(batch.id).request_counts.completed < 2:
            time.sleep(0.01)

        async def drain() -> None:
            server.server.admission.draining = True

        asyncio.run_coroutine_threadsafe(drain(), server.loop).result(10)
        time.sleep(1)
        assert engine.stats()["num_running"] == 0, "what ran is done, and nothing else has begun"
        done = client.batches.retrieve(batch.id).request_counts.completed
        assert done < 16
        with pytest.raises(openai.APIStatusError, match="shutting down"):
            create(client, [line("x", long)])
    with running(engine, batch_dir=tmp_path) as server:
        client = server.openai()
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 16)


def test_batches_belong_to_the_owner_of_the_key(engine, tmp_path):
    with running(engine, batch_dir=tmp_path, api_keys={"key-a": "ann", "key-b": "bob"}) as server:
        ann, bob = server.openai(api_key="key-a"), server.openai(api_key="key-b")
        batch, output, _ = run(ann, [line("a", COMPLETION)])
        assert bob.batches.list().data == [] and len(output) == 1
        for attempt in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                attempt(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.files.content(batch.output_file_id)


def test_too_many_results_fail_the_batch_and_keep_what_is_done(engine, tmp_path):
    with running(engine, batch_dir=tmp_path, max_stored_bytes=20_000, max_file_bytes=19_000) as server:
        client = server.openai()
        body = {**COMPLETION, "logprobs": 5}
        batch, output, errors = run(client, [line(f"{number}", body) for number in range(60)])
        assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
        assert 0 < len(output) == batch.request_counts.completed < 60 and errors == []
        with pytest.raises(openai.RateLimitError, match="delete some"):
            client.files.create(file=("x", bytes(10_000)), purpose="batch")


def test_a_full_disk_fails_the_batch_and_not_the_server(keeping, monkeypatch):
    client = keeping.openai()

    def fail(self: Any, records: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("jaxinfer.jobs.journal.Journal.append", fail)
        batch, output, _ = run(client, [line(f"{number}", COMPLETION) for number in range(3)])
    assert batch.status == "failed" and output == []
    assert batch.errors.data[0].code == "storage_error" and "No space" in batch.errors.data[0].message
    assert run(client, [line("later", COMPLETION)])[0].status == "completed"


@pytest.mark.slow
def test_a_killed_process_loses_and_repeats_nothing(tmp_path):
    lines = [line(f"{number}", {"prompt": f"text {number}", "max_tokens": 30}) for number in range(60)]
    command = [sys.executable, "-m", "jaxinfer.serve", "--model", TINY, "--port", "0", "--batch-dir", str(tmp_path)]
    command += ["--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "16"]
    batch_id, seen = None, set[str]()
    for count in (5, 25, 60):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            while "ready at" not in (told := process.stderr.readline()):
                assert told
            url = told.split("ready at ")[1].strip()
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
                batch_id = batch_id or create(client, lines).id
                while (batch := client.batches.retrieve(batch_id)).request_counts.completed < count:
                    time.sleep(0.01)
                if count == 60:
                    output = lines_of(client, ended(client, batch).output_file_id)
            process.kill()
        journal = tmp_path / "batches" / batch_id / "journal"
        if journal.exists():
            found = [record["told"]["id"] for _, group in groups(journal) for record in group]
            assert len(found) == len(set(found)) >= count and seen <= set(found)
            seen |= set(found)
    assert [each["custom_id"] for each in output] == [f"{number}" for number in range(60)]
    assert seen <= {each["id"] for each in output}, "what was committed was not run again"
