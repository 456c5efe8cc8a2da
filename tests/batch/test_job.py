"""What a job makes of its records: policies, formats, stores, and faults of the engine and its threads."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import fsspec
import pytest

from jaxinfer.batch import shard
from jaxinfer.batch.__main__ import main
from jaxinfer.batch.example import encode
from jaxinfer.batch.framing import frame
from jaxinfer.batch.inputs import read
from jaxinfer.batch.stand_in import StandIn
from tests.batch.conftest import command, prompt, write_prompts
from tests.batch.fake_job import TOKENIZER, open_fake

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama"


class Job:
    """The command in this process, on a stand-in for the model."""

    def __init__(self, folder, capsys):
        self.folder, self.out, self.state = folder, folder / "out", folder / "state"
        self.ran = folder / "ran"
        self._capsys = capsys

    def run(self, *flags, **settings):
        """The exit code, and what is said."""
        given = {"--input": f"{self.folder}/*.tfrecord", "--output": str(self.out), "--state": str(self.state)}
        code = main(command(given, flags), partial(open_fake, ran=self.ran, **{"num_rows": 2, **settings}))
        check_no_thread_is_left()
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def results(self, format="tfrecord", out=None):
        files = sorted((out or self.out).glob("results-*"))
        return [each.fields for path in files for each in read(str(path), format)]

    def errors(self):
        files = sorted(self.out.glob("errors-*"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def summary(self):
        return json.loads((self.out / "summary.json").read_text())

    def requests(self):
        return Counter(self.ran.read_text().split())


def check_no_thread_is_left():
    assert not [each for each in threading.enumerate() if each.name.startswith("jaxinfer-batch")]


@pytest.fixture
def job(tmp_path, capsys):
    return Job(tmp_path, capsys)


def write_mixed(path):
    """Ten records, of which 2 is no Example, 4 has no prompt, 5 a bad checksum, 6 a bad field and 8 is too long."""
    records = [encode(prompt("x", index)) for index in range(10)]
    records[2] = b"\xff\xff"
    records[4] = encode({"id": [4]})
    records[6] = encode(prompt("x", 6, temperature=[-1.0]))
    records[8] = encode({**prompt("x", 8), "prompt": [b"ab " * 400]})
    frames = [frame(each) for each in records]
    frames[5] = frames[5][:-5] + bytes([frames[5][-5] ^ 1]) + frames[5][-4:]
    path.write_bytes(b"".join(frames))
    return [sum(map(len, frames[:index])) for index in range(10)]


WRONG = {2: "no tf.train.Example", 4: "prompt", 5: "the checksum of the record's data", 6: "temperature"}


@pytest.mark.parametrize("policy", ["skip", "record"])
def test_records_that_cannot_be_run_are_told_and_counted(job, policy):
    path = job.folder / "a.tfrecord"
    offsets = write_mixed(path)
    more = "--records-per-shard", "3", "--on-error", policy, "--on-long-prompt", "skip"
    code, said = job.run(*more, max_model_len=100)
    assert code == 3 and "10 records, 5 of them errors" in said
    bad = {**WRONG, 8: "max_model_len=100"}
    errors = job.errors()
    assert [each["source_index"] for each in errors] == sorted(bad)
    for each in errors:
        index = each["source_index"]
        assert each["source_file"] == str(path) and bad[index] in each["error"]
        assert each["error"].startswith(f"{path}, record {index} (byte {offsets[index]:,}): ")
    results = job.results()
    whole = range(10) if policy == "record" else sorted(set(range(10)) - set(bad))
    assert [each["source_index"] for each in results] == [[index] for index in whole]
    told = sorted(bad) if policy == "record" else []
    assert [each["source_index"][0] for each in results if "error" in each] == told
    assert all(each["id"] == each["source_index"] for each in results if "id" in each)
    summary = job.summary()
    assert (summary["records"], summary["errors"]) == (10, 5)
    assert [(each["num_records"], each["num_errors"]) for each in summary["shards"]] == [(3, 1), (3, 2), (3, 2), (1, 0)]
    assert [each["errors"] is None for each in summary["shards"]] == [False, False, False, True]
    assert summary["completion_tokens"] == sum(each["completion_tokens"][0] for each in results)
    assert summary["prompt_tokens"] == sum(each["prompt_tokens"][0] for each in results)
    assert job.run(*more, max_model_len=100)[0] == 3  # as often as it is asked


def test_a_job_that_fails_at_a_record_goes_on_with_another_policy(job):
    path = job.folder / "a.tfrecord"
    offsets = write_mixed(path)
    code, said = job.run("--records-per-shard", "3", max_model_len=100)
    assert code == 1
    found = re.search(r"error: .*a.tfrecord, record (\d) \(byte ([\d,]+)\): (.*)\n", said)
    assert found is not None and found[2] == f"{offsets[int(found[1])]:,}"
    assert {**WRONG, 8: "the prompt has"}[int(found[1])] in found[3]
    assert "What is done is kept: go on with --on-" in said and not (job.out / "summary.json").exists()
    code, said = job.run("--records-per-shard", "3", "--on-error", "record", max_model_len=100)
    assert code == 1 and "record 8" in said and "--on-long-prompt skip or truncate-left" in said
    last = "--records-per-shard", "3", "--on-error", "record", "--on-long-prompt", "truncate-right"
    assert job.run(*last, max_model_len=100)[0] == 3
    results = job.results()
    assert [each["source_index"][0] for each in results if "error" in each] == [*WRONG]
    assert results[8]["prompt_tokens"] == [100 - (1 + 8 * 7 % 12)]
    code, said = job.run("--records-per-shard", "3", "--on-error", "skip", max_model_len=100)
    assert code == 1 and "on_error: record then, skip now" in said
    # It is as if that had been said at once.
    job.out, job.state = job.folder / "new", job.folder / "other"
    assert job.run(*last, max_model_len=100)[0] == 3
    assert job.results() == results


def test_left_out_prompts_stay_left_out(job):
    write_mixed(job.folder / "a.tfrecord")
    assert job.run("--on-long-prompt", "skip", max_model_len=100)[0] == 1
    code, said = job.run("--on-long-prompt", "skip", "--on-error", "record", max_model_len=100)
    assert code == 1 and "on_error: fail then, record now" in said
    assert job.run("--on-long-prompt", "skip", "--on-error", "skip", max_model_len=100)[0] == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_prompts_are_cut(job, side, monkeypatch):
    text = "".join(chr(97 + index % 26) for index in range(300))
    whole = {"prompt": [text.encode()], "max_tokens": [4]}
    (job.folder / "a.tfrecord").write_bytes(frame(encode(whole)))
    asked = []
    monkeypatch.setattr(StandIn, "add", noting(asked, StandIn.add))
    assert job.run("--on-long-prompt", f"truncate-{side}", max_model_len=50)[0] == 0
    tokens = asked[0][1]
    assert len(tokens) == 46 and job.results()[0]["prompt_tokens"] == [46]
    ids = TOKENIZER.encode(text)
    assert tokens == (ids[-46:] if side == "left" else ids[:46])


def noting(asked, add):
    def noted(self, *request):
        asked.append(request)
        add(self, *request)

    return noted


def test_records_bring_their_own_fields(job, monkeypatch):
    asked = []
    monkeypatch.setattr(StandIn, "add", noting(asked, StandIn.add))
    more = {"temperature": [0.5], "n": [2], "seed": [7], "stop": [b"x", b"y"]}
    records = [prompt("a", 0), prompt("a", 1, **more), {"prompt_token_ids": [5, 6], "tag": [b"t"]}]
    records.append({"messages": [b'[{"role": "user", "content": "hi"}]']})
    (job.folder / "a.tfrecord").write_bytes(b"".join(frame(encode(each)) for each in records))
    assert job.run("--temperature", "0.25", "--max-tokens", "9", "--seed", "3")[0] == 0
    params = {request_id: params for request_id, _, params in asked}
    own = params["0/1"]
    assert (own.temperature, own.n, own.seed, own.stop, own.max_tokens) == (0.5, 2, 7, ["x", "y"], 8)
    assert {params[place].temperature for place in ("0/0", "0/2", "0/3")} == {0.25}
    assert [params[f"0/{index}"].max_tokens for index in range(4)] == [1, 8, 9, 9]
    assert len({each.seed for each in params.values()}) == 4
    assert [ids for request_id, ids, _ in asked if request_id == "0/2"] == [[5, 6]]
    results = job.results()
    assert [len(each["text"]) for each in results] == [1, 2, 1, 1]
    assert results[1]["num_tokens"] == [8, 8] and results[1]["id"] == [1] and results[2]["tag"] == [b"t"]


@pytest.mark.parametrize("format", ["tfrecord", "jsonl", "parquet"])
def test_openais_lines_in_and_each_format_out(job, format):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": number}}
        for number in range(4)
    ]
    lines[2]["body"] = {**body, "model": "other"}
    lines.append({"prompt": "plain", "max_tokens": 2, "label": {"a": [1, None]}})
    (job.folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n\n" for each in lines))
    flags = ["--input", f"{job.folder}/in.jsonl", "--served-model-name", "tiny", "--on-error", "record"]
    code, said = job.run(*flags, "--format", format)
    assert code == 3, said
    assert "record 2" in job.errors()[0]["error"] and "other" in job.errors()[0]["error"]
    results = job.results(format)
    assert [path.suffix for path in job.out.glob("results-*")] == [f".{format}"]
    plain = {name: value[0] if format == "tfrecord" else value for name, value in results[4].items()}
    label = plain["label"]
    assert (json.loads(label) if isinstance(label, str | bytes) else label) == {"a": [1, None]}
    assert plain["completion_tokens"] == 2 and plain["source_index"] == 4
    ids = [each.get("custom_id") for each in results[:4]]
    assert ids == [[f"c{number}".encode()] if format == "tfrecord" else f"c{number}" for number in range(4)]
    assert [bool(each.get("error")) for each in results] == [False, False, True, False, False]


def test_a_store_for_inputs_and_results(job):
    store = fsspec.filesystem("memory")
    store.rm("/job", recursive=True) if store.exists("/job") else None
    write_prompts(job.folder / "local", 7)
    store.pipe_file("/job/in/a.tfrecord", (job.folder / "local").read_bytes())
    flags = ["--input", "memory://job/in/*.tfrecord", "--output", "memory://job/out", "--records-per-shard", "3"]
    code, said = job.run(*flags)
    assert code == 0, said
    names = sorted(path.rsplit("/", 1)[-1] for path in store.ls("/job/out", detail=False))
    results = [f"results-{number:05d}-of-00003.tfrecord" for number in range(3)]
    assert names == [".jaxinfer-owner", *results, "summary.json"]
    whole = {name: store.cat_file(f"/job/out/{name}") for name in results}
    assert not list(job.folder.rglob("*.part")) and job.requests().total() == 7
    store.rm_file("/job/out/results-00001-of-00003.tfrecord")
    assert job.run(*flags)[0] == 0
    assert job.requests().total() == 10 and whole == {name: store.cat_file(f"/job/out/{name}") for name in results}
    code, said = job.run(*flags, "--state", str(job.folder / "another"))
    assert code == 1 and "memory://job/out holds results of another job" in said
    store.pipe_file("/job/in/a.tfrecord", (job.folder / "local").read_bytes()[:-1] + b"x")
    code, said = job.run(*flags)
    assert code == 1 and "memory:///job/in/a.tfrecord had other content" in said
    code, said = job.run("--output", "memory://job/out", "--state", "memory://job/state")
    assert code == 2 and "must be a local folder" in said


def test_no_more_than_the_limit(job):
    write_prompts(job.folder / "a.tfrecord", 8)
    write_prompts(job.folder / "b.tfrecord", 5)
    assert job.run("--limit", "10", "--records-per-shard", "4")[0] == 0
    assert [each["source_index"][0] for each in job.results()] == [*range(8), 0, 1]
    assert job.summary()["records"] == 10 and job.requests().total() == 10
    assert job.run("--limit", "100", "--output", str(job.folder / "all"), "--state", str(job.folder / "s"))[0] == 0
    assert len(job.results(out=job.folder / "all")) == 13


def test_nothing_to_run(job):
    write_prompts(job.folder / "a.tfrecord", 0)
    assert job.run()[0] == 0 and job.summary()["records"] == 0
    assert job.run("--dry-run") == (0, "files: 1, records: 0, shards of results: 0\n")


def test_a_dry_run_counts_and_writes_nothing(job):
    write_prompts(job.folder / "a.tfrecord", 90)
    write_mixed(job.folder / "b.tfrecord")
    before = sorted(path.name for path in job.folder.rglob("*"))
    job.ran = None
    code, told = job.run("--dry-run", "--records-per-shard", "30", max_model_len=100, num_rows=100)
    assert code == 0 and sorted(path.name for path in job.folder.rglob("*")) == before
    assert told.startswith("files: 2, records: 100, shards of results: 4\nsample: 100 records spread over them\n")
    records = [each.fields for name in "ab" for each in read(str(job.folder / f"{name}.tfrecord"), "tfrecord")]
    good = [each for index, each in enumerate(records) if index < 90 or index - 90 not in {*WRONG, 8}]
    prompts = [len(TOKENIZER.encode(each["prompt"][0].decode())) for each in good]
    outputs = [each["max_tokens"][0] for each in good]
    assert "too long: 1 of the sample, so about 1: " in told and "not to be run: 4 of the sample, so about 4: " in told
    assert f"most {max(prompts)} tokens; in all about {sum(prompts):,}\n" in told
    assert f"most {max(outputs)} tokens (95 run); in all about {sum(outputs):,}\n" in told


def test_the_sample_of_a_dry_run_is_of_all_records(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 400)
    asked = []
    monkeypatch.setattr(StandIn, "add", noting(asked, StandIn.add))
    code, told = job.run("--dry-run", num_rows=256)
    places = [int(request_id.rsplit(" ", 1)[1]) for request_id, _, _ in asked]
    assert code == 0 and "sample: 256 records" in told
    assert len(places) == 256 and places[0] == 0 and places[-1] > 396 and sum(place < 200 for place in places) == 128


def test_wrong_calls(job):
    assert job.run("--limit", "0")[0] == 2
    assert job.run("--frobnicate")[0] == 2
    code, said = job.run("--input", str(job.folder / "none.tfrecord"))
    assert code == 1 and "none.tfrecord: no file has this name" in said


def test_what_the_engine_refuses_is_the_records_error(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 5)
    add = StandIn.add

    def refuse(self, request_id, *request):
        if request_id == "0/3":
            raise ValueError("logits_processors: there is none of this name")
        add(self, request_id, *request)

    monkeypatch.setattr(StandIn, "add", refuse)
    code, said = job.run()
    assert code == 1 and "record 3" in said and "logits_processors: there is none of this name" in said
    assert job.run("--on-error", "skip")[0] == 3
    assert [each["source_index"] for each in job.results()] == [[0], [1], [2], [4]]
    assert [each["source_index"] for each in job.errors()] == [3]


def test_a_dry_run_tells_what_the_engine_refuses(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 4)
    add = StandIn.add

    def refuse(self, request_id, *request):
        if request_id.endswith("record 3"):
            raise ValueError("no")
        add(self, request_id, *request)

    monkeypatch.setattr(StandIn, "add", refuse)
    code, told = job.run("--dry-run")
    assert code == 0
    assert "refused: 1 of 4 that were run: " in told and "record 3: no" in told and "(3 run)" in told


def test_a_failure_of_the_engine_ends_the_job_and_keeps_what_is_done(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 8)
    assert job.run("--output", str(job.folder / "whole"), "--state", str(job.folder / "other"))[0] == 0
    job.ran.unlink()
    step, num_steps = StandIn.step, 0

    def fail(self):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            raise RuntimeError("the device is lost")
        return step(self)

    monkeypatch.setattr(StandIn, "step", fail)
    code, said = job.run()
    assert code == 1
    assert said == "error: the device is lost; what is done is kept: the same command goes on\n"
    assert job.run()[0] == 0
    assert job.results() == job.results(out=job.folder / "whole") and job.requests().total() <= 8 + 4


def test_a_failure_to_commit_ends_the_job_while_the_engine_is_busy(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 8)
    commit, num_commits = shard.OpenShard.commit, 0

    def fail(self, results):
        nonlocal num_commits
        num_commits += 1
        if num_commits == 2:
            raise OSError(5, "Input/output error")
        commit(self, results)

    monkeypatch.setattr(shard.OpenShard, "commit", fail)
    begin_s = time.monotonic()
    code, said = job.run("--max-tokens", "4000", step_s=0.01)
    assert code == 1 and "Input/output error" in said and "once that is mended" in said
    assert time.monotonic() - begin_s < 5
    monkeypatch.setattr(shard.OpenShard, "commit", commit)
    assert job.run("--max-tokens", "4000")[0] == 0 and len(job.results()) == 8


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("odd"), KeyError("bug")])
def test_a_failure_to_read_ends_the_job(job, monkeypatch, error):
    write_prompts(job.folder / "a.tfrecord", 30)

    def fail(*where):
        for number, record in enumerate(read(*where)):
            if number == 9:
                raise error
            yield record

    with monkeypatch.context() as patched:
        patched.setattr("jaxinfer.batch.feed.read", fail)
        if isinstance(error, KeyError):  # a mistake of ours shows where it is
            with pytest.raises(KeyError, match="bug"):
                job.run("--window", "2")
            check_no_thread_is_left()
        else:
            code, said = job.run("--window", "2")
            assert code == 1 and str(error) in said
    assert job.run("--window", "2")[0] == 0 and len(job.results()) == 30


def test_an_encoding_that_fails_is_the_jobs_end_and_not_a_hang(job, monkeypatch):
    write_prompts(job.folder / "a.tfrecord", 30)
    with monkeypatch.context() as patched:
        patched.setattr("jaxinfer.batch.requests.Requests.make", lambda *what: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.run()
    check_no_thread_is_left()


@pytest.mark.slow
def test_the_command_from_prompts_to_results(tmp_path, capsys):
    records = [prompt("Once", index, temperature=[1.0], logprobs=[2]) for index in range(6)]
    records.append({"messages": [b'[{"role": "user", "content": "hi"}]'], "n": [2], "max_tokens": [3], "seed": [5]})
    records.append({"prompt": [b"word " * 100]})
    (tmp_path / "a.tfrecord").write_bytes(b"".join(frame(encode(each)) for each in records))
    argv = ["--input", f"{tmp_path}/a.tfrecord", "--model", str(TINY), "--max-tokens", "8", "--on-error", "record"]
    argv += ["--on-long-prompt", "skip", "--max-model-len", "64", "--max-num-seqs", "4", "--quiet"]
    for format in ("jsonl", "parquet"):
        out = tmp_path / format
        assert main([*argv, "--output", str(out), "--format", format]) == 3
        assert "8 records, 1 of them errors" in capsys.readouterr().err
        found = [each.fields for each in read(str(out / f"results-00000-of-00001.{format}"), format)]
        assert [each["source_index"] for each in found] == list(range(8)) and found[7]["error"]
        if format == "jsonl":
            choices = found[0]["choices"]
            assert len(choices[0]["token_ids"]) == len(choices[0]["logprobs"]) == found[0]["completion_tokens"]
            assert [len(each) for each in choices[0]["top_logprobs"]] == [2] * found[0]["completion_tokens"]
            assert len(found[6]["choices"]) == 2 and found[6]["completion_tokens"] <= 6
        summary = json.loads((out / "summary.json").read_text())
        assert summary["fingerprint"]["settings"]["format"] == format
        assert summary["completion_tokens"] == sum(each["completion_tokens"] for each in found)
    assert main([*argv, "--output", str(tmp_path / "none"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "files: 1, records: 8," in told and "too long: 1 of the sample" in told and not (tmp_path / "none").exists()
