"""Files through the OpenAI client, and what must not be possible with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxinfer.serve.file_store import FileStore
from tests.serve.conftest import Running, running

HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
KEYS = {"key-of-ann": "ann", "key-of-bob": "bob"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside") / "store"


@pytest.fixture(scope="module")
def keeping(engine: Any, folder: Path) -> Iterator[Running]:
    """A server that keeps files."""
    with running(engine, batch_dir=folder, max_file_bytes=3 << 20, max_stored_bytes=8 << 20) as found:
        yield found


def upload(server: Running, parts: list[tuple[str, Any]], key: str = "none") -> httpx.Response:
    return server.http.post("/v1/files", files=parts, headers={"Authorization": f"Bearer {key}"})


def test_a_file_comes_back_as_it_was(keeping, folder):
    client = keeping.openai()
    content = os.urandom(2 << 20)  # more than is held before it is written
    file = client.files.create(file=("some name.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", 2 << 20, "some name.jsonl", "batch")
    assert abs(file.created_at - time.time()) < 60 and file.status == "processed" and file.expires_at is None
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)
    assert list((folder / "files").iterdir()) == [] == list((folder / "parts").iterdir())


def test_files_are_listed_by_pages(keeping):
    client = keeping.openai()
    ids = [client.files.create(file=(f"{n}", b"x"), purpose="batch").id for n in range(5)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the client turns the pages"
    page = keeping.get("/v1/files?limit=2&order=asc").json()
    assert [file["id"] for file in page["data"]] == ids[:2] and page["has_more"] and page["last_id"] == ids[1]
    page = keeping.get(f"/v1/files?limit=9&order=asc&after={ids[1]}").json()
    assert [file["id"] for file in page["data"]] == ids[2:] and not page["has_more"]
    assert client.files.list(purpose="batch_output").data == []
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("page=2", "page")):
        answer = keeping.get(f"/v1/files?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert keeping.get("/v1/files?after=file-none").status_code == 404
    for each in ids:
        client.files.delete(each)


def test_a_file_goes_when_its_time_has_come(keeping, monkeypatch):
    client = keeping.openai()
    file = client.files.create(
        file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    later = time.time() + 3601
    monkeypatch.setattr("jaxinfer.serve.file_store.time.time", lambda: later)
    assert client.files.list().data == []


@pytest.mark.parametrize(
    ("parts", "param", "words"),
    [
        ([("purpose", (None, "batch"))], "file", "missing"),
        ([("file", ("a", b"x"))], "purpose", "missing"),
        ([("file", ("a", b"x")), ("purpose", (None, "fine-tune"))], "purpose", "batch"),
        ([("file", (None, "text")), ("purpose", (None, "batch"))], "file", "file name"),
        ([("file", ("a", b"x")), ("file", ("b", b"y")), ("purpose", (None, "batch"))], "file", "twice"),
        ([("file", ("a", b"x")), ("purpose", (None, "batch")), ("extra", (None, "1"))], "extra", "no such field"),
        ([("file", ("a", b"x")), ("purpose", (None, "x" * 2000))], "purpose", "1024"),
        (
            [("file", ("a", b"x")), ("purpose", (None, "batch")), ("expires_after[seconds]", (None, "9"))],
            "expires_after.anchor",
            "missing",
        ),
        (
            [
                ("file", ("a", b"x")),
                ("purpose", (None, "batch")),
                ("expires_after[anchor]", (None, "created_at")),
                ("expires_after[seconds]", (None, "9")),
            ],
            "expires_after.seconds",
            "3600",
        ),
    ],
)
def test_bad_forms_are_refused_by_name(keeping, folder, parts, param, words):
    answer = upload(keeping, parts)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["param"] == param, error
    assert list((folder / "files").iterdir()) == [] == list((folder / "parts").iterdir())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{}", "application/json"),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=b"),
        (
            HEAD + b"xyz",
            "multipart/form-data; boundary=b",
        ),
        (b"--b\r\n\r\nxyz\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (b"--b\r\n" * 40, "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=" + "b" * 5000),
    ],
)
def test_what_is_no_form_is_refused(keeping, folder, content, kind):
    answer = keeping.http.post("/v1/files", content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert list((folder / "parts").iterdir()) == []


def test_sizes_are_bounded(keeping, folder):
    client = keeping.openai()
    with pytest.raises(openai.APIStatusError, match="larger than") as error:
        client.files.create(file=("big", bytes(4 << 20)), purpose="batch")
    assert error.value.status_code == 413

    def endless() -> Iterator[bytes]:
        yield HEAD
        for _ in range(100):
            yield bytes(1 << 16)

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert keeping.http.post("/v1/files", content=endless(), headers=kind).status_code == 413
    ids = [client.files.create(file=("big", bytes(5 << 19)), purpose="batch").id for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="delete some"):
        client.files.create(file=("big", bytes(5 << 19)), purpose="batch")
    for each in ids:
        client.files.delete(each)
    store = keeping.uvicorn_server._batches.store
    assert store.stored_bytes == 0
    store._max_files = 0
    try:
        with pytest.raises(openai.RateLimitError, match="files are kept"):
            client.files.create(file=("one", b"x"), purpose="batch")
    finally:
        store._max_files = 10_000
    assert list((folder / "parts").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "..", "file-" + "0" * 32, "con", "a" * 3000, "\\..\\x", "x\u202ey"]
)
def test_a_name_is_never_a_path(keeping, folder, name):
    before = sorted(path for path in folder.parent.rglob("*"))
    file = keeping.openai().files.create(file=(name, b"content"), purpose="batch")
    assert file.filename == name[:255]
    new = {path.relative_to(folder).as_posix() for path in set(folder.parent.rglob("*")) - set(before)}
    assert new == {f"files/{file.id}", f"files/{file.id}.json"}
    keeping.openai().files.delete(file.id)


@pytest.mark.parametrize(
    "wrong",
    [
        "..", "../lock", "..%2Flock", "%2e%2e%2flock", "..%2f..%2fsecret", "%2Fetc%2Fpasswd", "file-..%2f..%2fsecret",
        "file-" + "0" * 32, "file-" + "0" * 31, "file-" + "0" * 32 + ".json", "file-" + "0" * 32 + "%0a",
        "%00", "a" * 4000,
    ],
)  # fmt: skip
def test_an_id_reaches_nothing_but_files(keeping, folder, wrong):
    (folder.parent / "secret").write_text("secret")
    real = keeping.openai().files.create(file=("x", b"x"), purpose="batch").id
    for path in (f"/v1/files/{wrong}", f"/v1/files/{wrong}/content", f"/v1/files/{real}%2f..%2f{wrong}/content"):
        answer = keeping.get(path)
        assert answer.status_code == 404, (path, answer.text)
    assert keeping.http.delete(f"/v1/files/{wrong}").status_code in (404, 405)
    assert (folder / "lock").exists() and (folder.parent / "secret").exists()
    keeping.openai().files.delete(real)


def test_files_belong_to_the_owner_of_the_key_and_outlive_the_server(engine, tmp_path):
    with running(engine, batch_dir=tmp_path, api_keys=KEYS) as server:
        ann, bob = (server.openai(api_key=key) for key in KEYS)
        file = ann.files.create(file=("hers", b"content"), purpose="batch")
        assert bob.files.list().data == []
        for attempt in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(file.id)
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert upload(server, [("file", ("a", b"x"))], "no-key").status_code == 401
        with pytest.raises(OSError, match="in use"):
            FileStore(tmp_path, 1, 1)
        with running(engine, batch_dir=tmp_path, needs_batch_dir=False) as other:
            assert other.get("/v1/files").json()["error"]["code"] == "batches_off"
    (tmp_path / "files" / ("file-" + "1" * 32)).write_bytes(b"of an upload that a crash cut off")
    (tmp_path / "files" / ("file-" + "2" * 32 + ".json")).write_bytes(b"damaged")
    (tmp_path / "parts" / "left").write_bytes(b"left")
    with running(engine, batch_dir=tmp_path, api_keys=KEYS) as server:
        ann = server.openai(api_key="key-of-ann")
        assert ann.files.list().data == [file]
        assert ann.files.content(file.id).content == b"content"
    assert not (tmp_path / "files" / ("file-" + "1" * 32)).exists()
    assert list((tmp_path / "parts").iterdir()) == []


def test_without_a_folder_there_are_no_files(serving):
    for path in ("/v1/files", "/v1/batches"):
        with serving() as server:
            answer = server.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "batches_off"
