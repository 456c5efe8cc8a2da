"""Which files patterns name, locally and behind URLs, and of what format they are."""

from __future__ import annotations

import os
import sys

import fsspec
import pytest

from jaxinfer.batch import inputs
from jaxinfer.batch.example import encode
from jaxinfer.batch.framing import frame


@pytest.fixture
def memory():
    """A folder of fsspec's memory:// with three TFRecord files; its URL."""
    filesystem = fsspec.filesystem("memory")
    for name in ("b.tfrecord", "a.tfrecord", "deep/c.tfrecord"):
        filesystem.pipe(f"/prompts/{name}", b"".join(frame(encode({"id": [i]})) for i in range(3)))
    yield "memory://prompts"
    filesystem.rm("/prompts", recursive=True)


def test_patterns_are_sorted_each_and_every_file_comes_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.tfrecord", "a.tfrecord", "odd[1].tfrecord", "deep/c.tfrecord"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.tfrecord").mkdir()
    assert inputs.expand(["b.*", "*.tfrecord"]) == ["b.tfrecord", "a.tfrecord", "odd[1].tfrecord"]
    assert inputs.expand(["odd[1].tfrecord"]) == ["odd[1].tfrecord"]
    assert inputs.expand(["**/*.tfrecord"])[-2:] == ["deep/c.tfrecord", "odd[1].tfrecord"]
    assert inputs.expand(["a.tfrecord", f"{tmp_path}/./a.tfrecord", f"file://{tmp_path}/a.tfrecord"]) == ["a.tfrecord"]


@pytest.mark.parametrize("pattern", ["none.tfrecord", "none*.tfrecord", "memory://none.tfrecord", "memory://none/*"])
def test_a_pattern_without_a_file_is_named(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(inputs.InputError, match="none.*: no file"):
        inputs.expand([pattern])


def test_a_folder_is_no_input(tmp_path, memory):
    for folder in (str(tmp_path), memory):
        with pytest.raises(inputs.InputError, match=r"is a folder: name its files, as .*/\*\.tfrecord"):
            inputs.expand([folder])


def test_urls_are_expanded_and_read(memory):
    found = inputs.expand([f"{memory}/*.tfrecord", f"{memory}/a.tfrecord", f"{memory}/**/c.tfrecord"])
    assert found == [
        "memory:///prompts/a.tfrecord",
        "memory:///prompts/b.tfrecord",
        "memory:///prompts/deep/c.tfrecord",
    ]
    assert inputs.expand([f"{memory}/a.tfrecord"]) == ["memory:///prompts/a.tfrecord"]
    assert [record.fields for record in inputs.read(found[0], "tfrecord")] == [{"id": [i]} for i in range(3)]
    scanned = inputs.scan(found[0], "tfrecord", 2)
    assert scanned.num_records == 3
    assert list(inputs.read(found[0], "tfrecord", scanned.starts[1]))[0].fields == {"id": [2]}


def test_a_local_folder_behind_fsspec_reads_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 0}\n{"id": 1}\n')
    url = f"local://{tmp_path}/a.jsonl"
    assert list(inputs.read(url, "jsonl")) == list(inputs.read(str(tmp_path / "a.jsonl"), "jsonl"))
    assert inputs.scan(url, "jsonl", 1) == inputs.scan(str(tmp_path / "a.jsonl"), "jsonl", 1)


def test_a_missing_package_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(inputs.InputError, match=r"gs://bucket/\*: .*gcsfs"):
        inputs.expand(["gs://bucket/*"])
    with pytest.raises(inputs.InputError, match="nothing://a: .*nothing"):
        inputs.expand(["nothing://a"])
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(inputs.InputError, match=r"URLs are read with fsspec: pip install 'jaxinfer\[batch\]'"):
        inputs.expand(["gs://bucket/*"])


def test_chains_of_urls_take_no_wildcards(memory):
    url = f"simplecache::{memory}/a.tfrecord"
    assert inputs.expand([url]) == [url]
    assert len(list(inputs.read(url, "tfrecord"))) == 3
    with pytest.raises(inputs.InputError, match="takes no wildcards"):
        inputs.expand([f"simplecache::{memory}/*.tfrecord"])


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.tfrecord", "tfrecord"), ("a.tfrecords.gz", "tfrecord"), ("a.TFREC", "tfrecord"),
        ("x.tfrecord-00000-of-00064", "tfrecord"), ("x.tfrecord-00000-of-00064.gz", "tfrecord"),
        ("x.jsonl-00001-of-00002", "jsonl"), ("prompts-00000-of-00064.tfrecord", "tfrecord"),
        ("gs://b/a.ndjson.zlib", "jsonl"), ("a.b/c.parquet", "parquet"), ("a.jsonl.gzip", "jsonl"),
    ],
)  # fmt: skip
def test_the_format_is_the_names(name, format):
    assert inputs.format_of(name) == format
    assert inputs.format_of(name, "parquet") == "parquet"


@pytest.mark.parametrize("name", ["prompts", "a.txt", "tfrecord/a", "a.tfrecord/b", "a.tfrecord.zip"])
def test_a_name_that_says_nothing_needs_the_flag(name):
    with pytest.raises(inputs.InputError, match="give --input-format"):
        inputs.format_of(name)
    assert inputs.format_of(name, "jsonl") == "jsonl"


def test_the_format_given_must_be_one():
    with pytest.raises(inputs.InputError, match="'csv' is no format of inputs: give one of tfrecord, jsonl, parquet"):
        inputs.format_of("a.csv", "csv")


def test_a_file_that_cannot_be_opened_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        inputs.scan(os.fspath(tmp_path / "none"), "jsonl", 1)
    with pytest.raises(FileNotFoundError):
        next(inputs.read(os.fspath(tmp_path / "none"), "tfrecord"))
    with pytest.raises(ValueError, match="every=0"):
        inputs.scan(os.fspath(tmp_path / "none"), "jsonl", 0)
