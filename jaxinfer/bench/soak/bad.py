"""Requests that must be refused, each with its own status and, where that is part of the promise, param and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.bench.soak.cases import Case, World

_MESSAGES = [{"role": "user", "content": "hi"}]


def _refused(
    path: str,
    body: dict[str, Any] | None = None,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    raw: bytes | None = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    may_be_full: bool = False,
) -> Callable[[World], Case]:
    def make(world: World) -> Case:
        from jaxinfer.bench.soak.cases import Case, Expect

        expect = Expect(status=status, param=param, code=code, may_be_full=may_be_full)
        return Case(0, "", path, body or {}, expect, method=method, raw=raw, headers=headers)

    return make


def _completion(param: str | None, code: str | None = None, may_be_full: bool = False, **change: Any) -> Any:
    body = {"prompt": "once", **change}
    return _refused("/v1/completions", body, param=param, code=code, may_be_full=may_be_full)


def _chat(param: str | None, code: str | None = None, may_be_full: bool = False, **change: Any) -> Any:
    body = {"messages": _MESSAGES, **change}
    return _refused("/v1/chat/completions", body, param=param, code=code, may_be_full=may_be_full)


def _too_long(world: World) -> Case:
    from jaxinfer.bench.soak.cases import Case, Expect

    body = {"prompt": [5] * (world.max_model_len + 1)}
    expect = Expect(status=400, param="prompt", code="context_length_exceeded", may_be_full=False)
    return Case(0, "", "/v1/completions", body, expect)


def _beyond_vocabulary(world: World) -> Case:
    from jaxinfer.bench.soak.cases import Case, Expect

    body = {"prompt": [5, world.vocab_size]}
    return Case(0, "", "/v1/completions", body, Expect(status=400, param="prompt", may_be_full=False))


def _raw(data: bytes, **expected: Any) -> Callable[[World], Case]:
    return _refused("/v1/completions", raw=data, **expected)


BAD: Sequence[Callable[[World], Case]] = (
    _too_long,
    _beyond_vocabulary,
    _completion("prompt", prompt=""),
    _completion("prompt", prompt=[]),
    _completion("prompt", prompt=None),
    _completion("prompt", prompt=7),
    _completion("prompt", prompt=[5, -1]),
    _completion("prompt[1]", prompt=["a", ""]),
    _completion("temperature", temperature=-1),
    _completion("temperature", temperature="hot"),
    _completion("top_p", top_p=0),
    _completion("n", n=0),
    _completion("n", n=10**6),
    _completion("best_of", n=3, best_of=2),
    _completion("logprobs", logprobs=21),
    _completion("max_tokens", max_tokens=-1),
    _completion("min_tokens", min_tokens=20, max_tokens=4),
    _completion("logit_bias", logit_bias={"a": 1}),
    _completion("stop", stop=[""]),
    _completion("seed", seed=-1),
    _completion("suffix", "unsupported_parameter", suffix="end"),
    _completion("best_off", "unknown_parameter", best_off=1),
    _completion("store", "unsupported_value", store=True),
    _completion("stream_options", stream_options={"include_usage": True}),
    _completion("prompt_logprobs", echo=True, logprobs=1, prompt_logprobs=1),
    _completion("timeout_s", timeout_s=0, may_be_full=True),
    _completion("priority", priority=2**31, may_be_full=True),
    _completion("guided_regex", "invalid_form", guided_regex="(", may_be_full=True),
    _completion("guided_grammar", "invalid_form", guided_grammar="start: nowhere", may_be_full=True),
    _completion("guided_choice", guided_regex="a", guided_choice=["a"]),
    _completion("guided_json", "invalid_form", guided_json={"type": "nothing"}, may_be_full=True),
    _chat("messages", messages=[]),
    _chat("messages", messages="hi"),
    _chat("messages[0].role", messages=[{"content": "hi"}]),
    _chat("top_logprobs", top_logprobs=2),
    _chat("max_tokens", max_tokens=0),
    _chat("tool_choice", tool_choice="required"),
    _chat("tools[0].type", tools=[{"type": "retrieval", "function": {"name": "f"}}]),
    _chat("tools", tools=[]),
    _chat("audio", "unsupported_parameter", audio={"voice": "x"}),
    _chat("response_format", response_format={"type": "json_schema"}),
    _refused("/v1/completions", {"model": "no-such", "prompt": "x"}, status=404, param="model", code="model_not_found"),
    _refused("/v1/models/no-such", method="GET", status=404, param="model", code="model_not_found"),
    _refused("/v1/nothing", {}, status=404),
    _refused("/v1/completions", method="GET", status=405),
    _refused("/v1/completions", method="DELETE", status=405),
    _refused("/detokenize", {"tokens": [-1]}, param="tokens"),
    _refused("/tokenize", {}, param="prompt"),
    _raw(b""),
    _raw(b"{"),
    _raw(b"[1]"),
    _raw(b"null"),
    _raw(b"\xff\xfe\x00"),
    _raw(b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    _raw(b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}"),
    _raw(b"prompt=x", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    _raw(b" " * (9 << 20), status=413),
)
