"""Lines of the access log: what they hold, what they never hold, and that a client cannot forge one."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.request_log import RequestRecord, as_json, as_text, request_id_of


@pytest.mark.parametrize("given", ["a", "7f0c-1", "trace:1/2_3.4=@+", "x" * 128])
def test_a_good_request_id_is_kept(given: str) -> None:
    assert request_id_of(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "line\nbreak", "ünicode", "a\n", 'quo"te'])
def test_a_bad_request_id_is_replaced(given: str | None) -> None:
    made = request_id_of(given)
    assert made != given and len(made) == 32 and request_id_of(made) == made
    assert made != request_id_of(given)


def record(**fields) -> RequestRecord:
    return RequestRecord("id-1", "POST", "/v1/chat/completions", started_s=1.25, status=200, duration_s=0.5, **fields)


def test_fields_of_a_generation() -> None:
    found = record(
        model="m",
        tenant="team",
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=3,
        finish_reasons=["stop", "length"],
        queue_s=0.1,
        ttft_s=0.2,
        e2e_s=0.4000000001,
        prompt="secret words",
    )
    assert found.fields() == {
        "time": "1970-01-01T00:00:01.250Z",
        "request_id": "id-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "duration_s": 0.5,
        "model": "m",
        "tenant": "team",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 3,
        "finish_reason": "stop,length",
        "queue_s": 0.1,
        "ttft_s": 0.2,
        "e2e_s": 0.4,
    }
    assert found.fields(with_prompt=True)["prompt"] == "secret words"


def test_what_is_not_known_is_left_out() -> None:
    assert set(record().fields(with_prompt=True)) == {"time", "request_id", "method", "path", "status", "duration_s"}


@given(st.text(), st.text())
def test_no_text_breaks_a_line(path: str, tenant: str) -> None:
    fields = {**record(tenant=tenant).fields(), "path": path}
    assert json.loads(as_json(fields)) == fields
    for line in (as_json(fields), as_text(fields)):
        assert "\n" not in line and "\r" not in line
    # Every value comes back from the text: plain words as they are, others as JSON strings.
    assert as_text({"path": path}).startswith("path=")
    value = as_text({"path": path}).removeprefix("path=")
    assert (json.loads(value) if value.startswith('"') else value) == path


def test_text_is_words() -> None:
    words = shlex.split(as_text(record(model="a model", disconnected=True).fields()))
    assert "status=200" in words and "model=a model" in words and "disconnected=true" in words
