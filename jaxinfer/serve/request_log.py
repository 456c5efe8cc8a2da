"""What is known of an HTTP request when it has been answered: for the access log, the metrics and the traces."""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.request import RequestOutput

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)


def request_id_of(given: str | None) -> str:
    """The client's `X-Request-Id` where it is one of up to 128 plain characters, else a new id."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex


@dataclass
class RequestRecord:
    """One HTTP request. Handlers fill in what they learn; `status` is 0 until an answer has begun."""

    request_id: str
    method: str
    path: str
    started_s: float = field(default_factory=time.time)
    status: int = 0
    route: str = ""
    duration_s: float = 0.0
    disconnected: bool = False
    error: str | None = None
    model: str | None = None
    tenant: str | None = None
    params: Any = None  # SamplingParams
    stream: bool | None = None
    prompt: Any = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    _num_running: int = 0

    def begin(self, params: Any, num_prompt_tokens: int) -> None:
        """A prompt of the request goes to the engine; of several, the first one's parameters are kept."""
        self.params = self.params or params
        self.num_prompt_tokens = (self.num_prompt_tokens or 0) + num_prompt_tokens
        self._num_running += 1

    def note(self, output: RequestOutput) -> None:
        """What is new of a prompt: all of it, or a delta."""
        for choice in output.outputs:
            self.num_output_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)
        metrics = output.metrics
        if output.finished:
            self._num_running -= 1
            self.num_cached_tokens += output.num_cached_tokens
            self.e2e_s = max(self.e2e_s or 0.0, metrics["e2e_s"]) if "e2e_s" in metrics else self.e2e_s
        for name in ("queue_s", "ttft_s"):  # the earliest
            if name in metrics:
                before = getattr(self, name)
                setattr(self, name, metrics[name] if before is None else min(before, metrics[name]))

    def end(self) -> None:
        """The request is given up or done: what has not finished was aborted."""
        self.finish_reasons += ["abort"] * self._num_running
        self._num_running = 0

    def fields(self, with_prompt: bool = False) -> dict[str, Any]:
        """The access log's fields, in their order; those that do not apply are left out."""
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.started_s))
        found: dict[str, Any] = {
            "time": f"{time_text}.{int(self.started_s % 1 * 1000):03}Z",
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": self.duration_s,
            "model": self.model,
            "tenant": self.tenant or None,
        }
        if self.num_prompt_tokens is not None:
            found |= {
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "output_tokens": self.num_output_tokens,
                "finish_reason": ",".join(self.finish_reasons) or None,
                "queue_s": self.queue_s,
                "ttft_s": self.ttft_s,
                "e2e_s": self.e2e_s,
            }
        found |= {"disconnected": self.disconnected or None, "error": self.error}
        if with_prompt:
            found["prompt"] = self.prompt
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
        return {name: value for name, value in rounded.items() if value is not None}


def as_json(fields: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(fields, ensure_ascii=False, default=str)


def as_text(fields: dict[str, Any]) -> str:
    """One line of key=value; a value that is not one plain word is a JSON string, so none can start a line."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if re.fullmatch(r"[!#-<>-~]+", text) else json.dumps(text)
