"""What the fields of embeddings, scores, files and batches do, for the walk of `test_fields.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

EMBEDDINGS, SCORE, FILES, BATCHES = "/v1/embeddings", "/v1/score", "/v1/files", "/v1/batches"
UPLOADED = "the id of a file with one request"
BASES: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "once upon a time"},
    SCORE: {"text_1": "once upon a time", "text_2": "upon a time"},
    FILES: {"file": ("name.jsonl", b"content"), "purpose": "batch"},
    BATCHES: {"input_file_id": UPLOADED, "endpoint": "/v1/completions", "completion_window": "24h"},
}
REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
Check = Callable[[Any], None]


def post(served: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    """Ask one of these endpoints; files are sent as forms."""
    if path == FILES:
        parts = [(name, value if isinstance(value, tuple) else (None, str(value))) for name, value in body.items()]
        return served.http.post(path, files=[part for part in parts if part[1][1] != "None"])
    if body.get("input_file_id") == UPLOADED:
        parts = [("file", ("requests.jsonl", json.dumps(REQUEST))), ("purpose", (None, "batch"))]
        body = {**body, "input_file_id": served.http.post(FILES, files=parts).json()["id"]}
    return served.post(path, body)


def _value(ask: Any, **changes: Any) -> Any:
    """The vector, or the score."""
    found = ask.answer(**changes)["data"][0]
    return found["score"] if ask.path == SCORE else found["embedding"]


def _changes(**field: Any) -> Check:
    def check(ask: Any) -> None:
        assert _value(ask) == _value(ask) != _value(ask, **field)

    return check


def _special_tokens(ask: Any) -> None:
    tokenizer = ask.served.server.tokenizer
    texts = BASES[ask.path].values()
    for special in (True, False):
        expected = sum(len(tokenizer.encode(text, special)) for text in texts)
        assert ask.answer(add_special_tokens=special)["usage"]["prompt_tokens"] == expected


def _truncates(ask: Any) -> None:
    assert ask.answer(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == (6 if ask.path == SCORE else 3)
    assert ask.error(truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"


def _cache_salt(ask: Any) -> None:
    text = f"of {ask.path}, more than a page of sixteen tokens in the cache of keys and values"
    body = {"prompt": text, "max_tokens": 1, "cache_salt": "mine"}
    cached = lambda: ask.served.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
    given = {"text_1": text} if ask.path == SCORE else {"input": text}
    ask.answer(**given)
    ask.answer(**given, cache_salt="mine")
    assert cached() > 0


def _timeout(ask: Any) -> None:
    assert ask.error(timeout_s=1e-6)["code"] == "timeout"


READING: dict[str, Check] = {
    "pooling": _changes(pooling="last"),
    "add_special_tokens": _special_tokens,
    "truncate_prompt_tokens": _truncates,
    "cache_salt": _cache_salt,
    "timeout_s": _timeout,
}


def _input(ask: Any) -> None:
    assert len(ask.answer(input=["a", "b"])["data"]) == 2 and _value(ask, input="a") != _value(ask, input="b")


def _encoding(ask: Any) -> None:
    assert isinstance(_value(ask, encoding_format="base64"), str) and isinstance(_value(ask), list)


def _dimensions(ask: Any) -> None:
    assert len(_value(ask, dimensions=3)) == 3


def _likelihood(ask: Any) -> None:
    form = {"text_1": ..., "text_2": ...}
    one, other = ask.answer(**form, prompt="once", continuations=[" upon", " down"])["data"]
    assert one["score"] != other["score"]
    (again,) = ask.answer(**form, prompt="twice", continuations=" upon")["data"]
    assert again["score"] != one["score"]


def _text(ask: Any) -> None:
    assert abs(_value(ask, text_1="a", text_2="a") - 1) < 1e-6 and _value(ask, text_1="a", text_2="b") < 1


def _file(ask: Any) -> None:
    found = ask.answer(file=("mine", b"of mine"))
    assert (found["filename"], found["bytes"]) == ("mine", 7)
    assert ask.served.get(f"{FILES}/{found['id']}/content").content == b"of mine"


def _purpose(ask: Any) -> None:
    assert ask.answer()["purpose"] == "batch" and ask.error(purpose="vision")["param"] == "purpose"


def _expires_after(ask: Any) -> None:
    form = {"expires_after[anchor]": "created_at", "expires_after[seconds]": 7200}
    found = ask.answer(**form)
    assert found["expires_at"] == found["created_at"] + 7200 and ask.answer()["expires_at"] is None


def _ended(ask: Any, **changes: Any) -> Any:
    batch = ask.answer(**changes)
    end_s = time.monotonic() + 30
    while batch["status"] not in ("completed", "failed") and time.monotonic() < end_s:
        time.sleep(0.05)
        batch = ask.served.get(f"{BATCHES}/{batch['id']}").json()
    return batch


def _input_file(ask: Any) -> None:
    assert _ended(ask)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert ask.error(input_file_id="file-none")["param"] == "input_file_id"


def _endpoint(ask: Any) -> None:
    assert _ended(ask, endpoint="/v1/embeddings")["request_counts"]["failed"] == 1


def _window(ask: Any) -> None:
    found = ask.answer()
    assert found["expires_at"] == found["created_at"] + 24 * 3600
    assert ask.error(completion_window="1h")["param"] == "completion_window"


def _metadata(ask: Any) -> None:
    assert ask.answer(metadata={"run": "7"})["metadata"] == {"run": "7"}


def _output_expires_after(ask: Any) -> None:
    batch = _ended(ask, output_expires_after={"anchor": "created_at", "seconds": 7200})
    file = ask.served.get(f"{FILES}/{batch['output_file_id']}").json()
    assert file["expires_at"] == file["created_at"] + 7200


def effects(model: Check, user: Check, priority: Check) -> dict[str, dict[str, Check]]:
    """The checks of each endpoint, given those of fields that others have too."""
    reading = {"model": model, "user": user, "priority": priority, **READING}
    return {
        EMBEDDINGS: {**reading, "input": _input, "encoding_format": _encoding, "dimensions": _dimensions},
        SCORE: {**reading, "prompt": _likelihood, "continuations": _likelihood, "text_1": _text, "text_2": _text},
        FILES: {"file": _file, "purpose": _purpose, "expires_after": _expires_after},
        BATCHES: {
            "input_file_id": _input_file,
            "endpoint": _endpoint,
            "completion_window": _window,
            "metadata": _metadata,
            "output_expires_after": _output_expires_after,
        },
    }
