"""What people get wrong with jobs, and what stores do: each is refused by name, or does no harm."""

from __future__ import annotations

import json
import os
import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxinfer.batch.__main__ import main
from jaxinfer.batch.destination import Destination
from jaxinfer.batch.errors import JobError
from jaxinfer.batch.fields import plain
from jaxinfer.batch.inputs import InputError, expand, format_of, stamp
from jaxinfer.batch.records import size_of
from jaxinfer.batch.stand_in import open_stand_in


@pytest.fixture
def run(tmp_path, capsys):
    """The command without a model; gives the exit code and what it said."""

    def call(*argv):
        code = main([*argv, "--format", "jsonl"], open_stand_in)
        return code, capsys.readouterr().err

    return call


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "id": i}) + "\n" for i in range(3)))
    return path


made: list[str] = []


class Store(MemoryFileSystem):
    """Knows no folders, as object stores do, and tells of no file when it changed."""

    protocol = "s3"
    store: dict = {}
    pseudo_dirs = [""]

    def ls(self, path, detail=True, **options):
        found = [name for name in self.store if name.startswith(self._strip_protocol(path) + "/")]
        if not found:
            raise FileNotFoundError(path)
        return [{"name": name} for name in found] if detail else found

    def makedirs(self, path, exist_ok=False):
        made.append(path)


def test_a_store_has_no_folder_before_its_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.batch.destination._file_system", lambda url: (Store(), "/bucket/out"))
    destination = Destination("s3://bucket/out", tmp_path)
    assert destination.names() == [] and made == []  # it would make a bucket
    destination.put_bytes("x", b"1")
    assert destination.names() == ["x"] and destination.read_bytes("x") == b"1"


def test_a_store_whose_package_is_missing_is_refused(tmp_path, run, prompts):
    code, said = run("--input", str(prompts), "--output", "nosuch://b/x", "--state", str(tmp_path / "s"))
    assert code == 1 and "--output nosuch://b/x" in said and "Traceback" not in said
    with pytest.raises(JobError, match="pip install"):
        Destination("nosuch://b/x", tmp_path)


def test_a_file_of_which_nothing_is_told_may_have_changed(monkeypatch):
    store = fsspec.filesystem("memory")
    store.pipe_file("/told/a", b"1")
    assert stamp("memory://told/a")
    monkeypatch.setattr(type(store), "info", lambda self, path, **_: {"name": path, "size": 1})
    assert stamp("memory://told/a") == ""


def test_two_jobs_with_one_output(tmp_path, run, prompts):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 5}\n')
    out = ["--output", str(tmp_path / "out")]
    first = ["--input", str(bad), *out, "--state", str(tmp_path / "s1")]
    assert run(*first)[0] == 1
    assert run("--input", str(prompts), *out, "--state", str(tmp_path / "s2"))[0] == 0
    whole = (tmp_path / "out" / "results-00000-of-00001.jsonl").read_bytes()
    code, said = run(*first, "--on-error", "record")
    assert code == 1 and "another job has written to" in said
    assert (tmp_path / "out" / "results-00000-of-00001.jsonl").read_bytes() == whole


def test_a_finished_job_with_other_arguments_opens_the_model(tmp_path, run, prompts, monkeypatch):
    given = ["--input", str(prompts), "--output", str(tmp_path / "out")]
    assert run(*given)[0] == 0
    opened = []

    def open_other(config):
        opened.append(config.model)
        raise ValueError("there is no such model")

    assert main([*given, "--format", "jsonl"], open_stand_in) == 0
    assert main([*given, "--format", "jsonl", "--model", "other"], open_other) == 1 and opened == ["other"]


def test_results_are_no_inputs_of_their_job(tmp_path, run, prompts):
    given = ["--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path)]
    for _ in range(2):
        assert run(*given)[0] == 0
    assert json.loads((tmp_path / "summary.json").read_text())["records"] == 3
    code, said = run("--input", str(tmp_path / "results-*.jsonl"), "--output", str(tmp_path))
    assert code == 1 and "all inputs are results of this job" in said


def test_a_name_that_no_record_has_is_told(tmp_path, run, prompts):
    code, said = run("--input", str(prompts), "--output", str(tmp_path / "out"), "--pass-through", "id", "idd")
    assert code == 0 and "no record had idd, which --pass-through names" in said


def test_a_job_of_which_nothing_is_done_may_begin_anew(tmp_path, run, prompts):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 5}\n')
    out = ["--output", str(tmp_path / "out")]
    assert run("--input", str(bad), *out)[0] == 1
    code, said = run("--input", str(prompts), *out)
    assert code == 1 and "Nothing of it is done: without" in said
    shutil.rmtree(tmp_path / "out" / ".jaxinfer-job")
    assert run("--input", str(prompts), *out)[0] == 0
    code, said = run("--input", str(bad), *out)
    assert code == 1 and "Nothing of it is done" not in said


def test_names_that_cannot_be_inputs(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="no regular file"):
        expand([str(tmp_path / "pipe.jsonl")])
    with pytest.raises(InputError, match="compressed within"):
        format_of("a.parquet.gz")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert len(expand([str(tmp_path / "[ab].jsonl")])) == 1


def test_nulls_of_a_struct_are_no_entries():
    assert plain("logit_bias", {"5": 1.0, "6": None}) == {5: 1.0}


def test_the_size_of_fields():
    assert size_of({"a": "x" * 100, "b": [b"y" * 50, b"z"], "c": [1, 2], "d": None}) == 100 + 51 + 16 + 8


@pytest.mark.slow
def test_a_setting_of_the_job_is_not_blamed_on_records(tmp_path, prompts, capsys):
    from tests.batch.test_crash import TINY

    given = ["--input", str(prompts), "--output", str(tmp_path / "out"), "--model", str(TINY), "--on-error", "skip"]
    assert main([*given, "--structured-outputs", '{"regex": "("}']) == 1
    said = capsys.readouterr().err
    assert "the job's sampling settings" in said and "record" not in said.rpartition("settings")[2]
