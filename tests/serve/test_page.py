"""The page's files: served with a strict policy, complete, and free of outside hosts and of markup made from text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from jaxinfer.serve import error_handlers, page

FOLDER = Path(page.__file__).parent / "page"
SOURCES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
SCRIPTS = {name: text for name, text in SOURCES.items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    error_handlers.install(app)
    app.include_router(page.router)
    with TestClient(app) as client:
        yield client


def test_every_file_is_served() -> None:
    assert set(SOURCES) == {*page.FILES, "index.html"}, "a file of an unknown kind lies in the folder"


@pytest.mark.parametrize("path", ["/", *sorted(page.PATHS - {"/"})])
def test_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kind = {"/": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kind[path.rpartition(".")[2]]


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    etag = client.get("/page/main.js").headers["etag"]
    again = client.get("/page/main.js", headers={"If-None-Match": etag})
    assert again.status_code == 304 and again.content == b""
    assert "content-security-policy" in again.headers


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "index.html", "page.py", ".", "index.html%00"]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 404 and "error" in answer.json()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_outside_host(name: str) -> None:
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")  # a namespace, never fetched
    assert re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+|@import|url\(", text) == []


def test_nothing_inline() -> None:
    html = SOURCES["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html) == []
    assert re.findall(r"<script([^>]*)>(.*?)</script>", html, re.S) == [(' type="module" src="page/main.js"', "")]


def test_text_never_becomes_markup() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
    assert {name: found for name, text in SCRIPTS.items() if (found := re.findall(sinks, text))} == {}


def test_references_lead_somewhere() -> None:
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', SOURCES["index.html"]))
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named == set(SOURCES) - {"index.html"}
    ids = set(re.findall(r'\sid="([^"]+)"', SOURCES["index.html"]))
    used = {each for text in SCRIPTS.values() for each in re.findall(r'byId\("([^"]+)"\)', text)}
    assert used - ids == set()


def test_every_field_has_a_label() -> None:
    html = SOURCES["index.html"]
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', html))
    inside = re.sub(r"<label(?![^>]* for=)[^>]*>.*?</label>", "", html, flags=re.S)
    for field in re.findall(r"<(?:input|textarea|select)[^>]*>", inside):
        assert (found := re.search(r'\sid="([^"]+)"', field)) and found[1] in labelled, field
    for button in re.findall(r"<button([^>]*)>\s*</button>", html):
        assert "aria-label=" in button
