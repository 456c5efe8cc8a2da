"""Whether an answer is what its request must get."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.bench.soak.answers import Answer, Choice
from jaxinfer.bench.soak.cases import Case
from jaxinfer.bench.soak.forms import has_form


def wrong_error(case: Case, status: int, headers: Mapping[str, str], data: bytes) -> str | None:
    """What is wrong with an answer of another status than 200; None where it is in order."""
    expect = case.expect
    if status >= 500:
        return f"HTTP {status}: {data[:300]!r}"
    error = _error_in(data)
    if error is None:
        return f"HTTP {status} without an error in the API's shape: {data[:300]!r}"
    if status == 429 and expect.may_be_full:
        after = headers.get("Retry-After", "")
        return None if after.isdecimal() and int(after) >= 1 else f"429 with Retry-After {after!r}"
    if status != expect.status:
        return f"HTTP {status}, not {expect.status}: {error['message']}"
    for name, wanted in (("param", expect.param), ("code", expect.code)):
        if wanted is not None and error[name] != wanted:
            return f"{name} {error[name]!r}, not {wanted!r}: {error['message']}"
    return None


def _error_in(data: bytes) -> dict[str, Any] | None:
    """An error of OpenAI's form; of Anthropic's form, as one of OpenAI's."""
    try:
        found = json.loads(data)
        error = found["error"]
        if found.get("type") == "error":
            error = {"param": None, "code": None, **error}
        good = isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        return error if good and {"param", "code"} <= set(error) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def wrong_answer(case: Case, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer of status 200."""
    expect = case.expect
    if expect.status != 200:
        yield f"HTTP 200, not {expect.status}"
        return
    if case.path == "/tokenize":
        return
    if expect.num_choices is not None and sorted(answer.choices) != list(range(expect.num_choices)):
        yield f"choices {sorted(answer.choices)}, not {expect.num_choices}"
    for index, choice in sorted(answer.choices.items()):
        for what in _wrong_choice(case, choice):
            yield f"choice {index}: {what}"
    yield from _wrong_usage(case, answer)


def _wrong_choice(case: Case, choice: Choice) -> Iterator[str]:
    expect = case.expect
    if case.path in ("/v1/embeddings", "/v1/score"):
        return
    if choice.finish_reason not in expect.reasons:
        yield f"finish_reason {choice.finish_reason!r}, not one of {sorted(expect.reasons)}"
    if expect.echo is not None and not choice.text.startswith(expect.echo):
        yield f"the text {choice.text[:80]!r} does not begin with the prompt"
    if expect.form is not None and choice.finish_reason == "stop" and not has_form(expect.form, choice.text):
        yield f"the text {choice.text[:200]!r} has not the form {expect.form}"
    if expect.logprobs != (choice.num_logprobs is not None) and choice.finish_reason != "timeout":
        yield f"{choice.num_logprobs} log-probabilities, {'some' if expect.logprobs else 'none'} wanted"
    if any(each is not None and not (math.isfinite(each) and each <= 1e-5) for each in choice.logprobs):
        yield "a log-probability that is none"
    if choice.token_ids is not None and expect.max_tokens is not None:
        num = len(choice.token_ids)
        if num > expect.max_tokens or (expect.exact and num != expect.max_tokens):
            yield f"{num} tokens of {expect.max_tokens}"
    yield from _wrong_calls(case, choice)


def _wrong_calls(case: Case, choice: Choice) -> Iterator[str]:
    wanted = case.expect.calls
    if case.expect.status == 200 and choice.calls and "tools" not in case.body:
        yield "calls of functions that were not given"
    if choice.finish_reason != "tool_calls" or wanted is None:
        return
    if not choice.calls or any(call["name"] not in ("add", "now") for call in choice.calls):
        yield f"calls {choice.calls}"
    if wanted != "any" and [call["name"] for call in choice.calls] != [wanted]:
        yield f"calls {choice.calls}, not one of {wanted}"
    for call in choice.calls:
        try:
            arguments = json.loads(call["arguments"])
            good = call["name"] != "add" or (set(arguments) == {"a", "b"} and set(arguments.values()) <= {1, 2, 3})
        except (ValueError, TypeError, AttributeError):
            good = False
        if not good:
            yield f"a call of {call['name']} with {call['arguments']!r:.200}"


def _wrong_usage(case: Case, answer: Answer) -> Iterator[str]:
    expect, usage = case.expect, answer.usage
    if usage is None:
        options = case.body.get("stream_options") or {}
        if not case.stream or options.get("include_usage"):
            yield "no usage"
        return
    num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"]
    if usage["total_tokens"] != num_prompt + num_output or num_prompt < 1 or num_output < 0:
        yield f"usage {dict(usage)}"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not 0 <= cached <= num_prompt:
        yield f"{cached} cached tokens of {num_prompt}"
    if expect.prompt_tokens is not None and num_prompt != expect.prompt_tokens:
        yield f"{num_prompt} prompt tokens are told, {expect.prompt_tokens} were sent"
    if expect.max_tokens is not None:
        num_shown, num_made = _num_choices(case)
        most = expect.max_tokens * max(1, len(answer.choices)) * num_made // num_shown
        if num_output > most or (expect.exact and num_output != most):
            yield f"{num_output} tokens are told, {'' if expect.exact else 'at most '}{most} were asked for"
    yield from _wrong_counts(case, answer, num_prompt, num_output)


def _num_choices(case: Case) -> tuple[int, int]:
    """How many choices of a prompt are shown, and how many are made, whose tokens the usage counts."""
    num_shown = case.body.get("n") or 1
    return num_shown, case.body.get("best_of") or num_shown


def _wrong_counts(case: Case, answer: Answer, num_prompt: int, num_output: int) -> Iterator[str]:
    """Counts that must be the usage's."""
    choices = list(answer.choices.values())
    of_prompt = [choice.num_prompt_logprobs for choice in choices if choice.num_prompt_logprobs is not None]
    if isinstance(case.body.get("prompt"), list) and case.body["prompt"] and type(case.body["prompt"][0]) is int:
        for num in of_prompt:
            if num != num_prompt:
                yield f"{num} entries of prompt_logprobs for {num_prompt} tokens"
    num_shown, num_made = _num_choices(case)
    if num_made > num_shown:
        return
    if all(choice.token_ids is not None for choice in choices) and choices:
        came = sum(len(choice.token_ids or ()) for choice in choices)
        if came != num_output:
            yield f"{came} token ids came, {num_output} are told"
    if all(choice.num_logprobs is not None for choice in choices) and choices:
        came = sum(choice.num_logprobs or 0 for choice in choices)
        echoed = num_prompt * case.body.get("n", 1) if case.body.get("echo") else 0
        if came != num_output + echoed:
            yield f"log-probabilities of {came} tokens came, {num_output + echoed} are told"
