"""Answers of all endpoints, whole or streamed, in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class WrongAnswer(Exception):
    """An answer that breaks the protocol."""


@dataclass
class Choice:
    """One choice, put together from its chunks where it was streamed."""

    text: str = ""
    finish_reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] | None = None
    num_logprobs: int | None = None
    logprobs: list[float | None] = field(default_factory=list)
    num_prompt_logprobs: int | None = None


@dataclass
class Answer:
    """What came back with status 200: `usage` as OpenAI's names have it, None where a stream did not tell."""

    choices: dict[int, Choice]
    usage: Mapping[str, Any] | None
    num_prompt_tokens: int | None = None


def whole(path: str, data: bytes) -> Answer:
    """The answer that a body holds. Raises `WrongAnswer`."""
    try:
        found = json.loads(data)
        read = {
            "/v1/embeddings": _embeddings,
            "/v1/score": _scores,
            "/v1/responses": _response,
            "/v1/messages": _message,
        }
        if path == "/tokenize":
            return _tokens(found)
        return read[path](found) if path in read else _choices(found)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WrongAnswer(f"{type(error).__name__}: {error}: {data[:300]!r}") from error


def streamed(path: str, events: Sequence[bytes]) -> Answer:
    """The answer that a stream's events make together. Raises `WrongAnswer`."""
    try:
        if path == "/v1/responses":
            return _response_events([json.loads(each) for each in events])
        if path == "/v1/messages":
            return _message_events([json.loads(each) for each in events])
        return _chunks(events)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WrongAnswer(f"{type(error).__name__}: {error}: {b' '.join(events)[:300]!r}") from error


def _choices(found: Mapping[str, Any]) -> Answer:
    choices: dict[int, Choice] = {}
    for each in found["choices"]:
        if each["index"] in choices:
            raise WrongAnswer(f"two choices have the index {each['index']}")
        choices[each["index"]] = choice = Choice()
        _add(choice, each, each.get("message", {}))
    return Answer(choices, found["usage"])


def _chunks(events: Sequence[bytes]) -> Answer:
    if not events or events[-1] != b"[DONE]":
        raise WrongAnswer(f"the stream of {len(events)} events does not end with [DONE]")
    if b"[DONE]" in events[:-1]:
        raise WrongAnswer("data after [DONE]")
    choices: dict[int, Choice] = {}
    usage = None
    for chunk in map(json.loads, events[:-1]):
        if "error" in chunk:
            raise WrongAnswer(f"an error in the stream: {chunk['error']}")
        if usage is not None:
            raise WrongAnswer("a chunk after that of the usage")
        for each in chunk["choices"]:
            choice = choices.setdefault(each["index"], Choice())
            if choice.finish_reason is not None:
                raise WrongAnswer(f"choice {each['index']} goes on after its finish_reason")
            _add(choice, each, each.get("delta", {}))
        usage = chunk.get("usage")
    return Answer(choices, usage)


def _add(choice: Choice, told: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    choice.text += told.get("text") or message.get("content") or ""
    choice.finish_reason = told["finish_reason"]
    for number, call in enumerate(message.get("tool_calls") or ()):
        index = call.get("index", number)
        if index == len(choice.calls):
            choice.calls.append({"name": call["function"]["name"], "arguments": ""})
        choice.calls[index]["arguments"] += call["function"].get("arguments") or ""
    if "token_ids" in told:
        choice.token_ids = [*(choice.token_ids or []), *told["token_ids"]]
    if (logprobs := told.get("logprobs")) is not None:
        of_chat = logprobs.get("content")
        numbers = logprobs["token_logprobs"] if of_chat is None else [each["logprob"] for each in of_chat]
        choice.num_logprobs = (choice.num_logprobs or 0) + len(numbers)
        choice.logprobs += numbers
        if of_chat is None and {len(logprobs[name]) for name in logprobs} != {len(numbers)}:
            raise WrongAnswer("the lists of logprobs have different lengths")
    if told.get("prompt_logprobs") is not None:
        choice.num_prompt_logprobs = len(told["prompt_logprobs"])


def _tokens(found: Mapping[str, Any]) -> Answer:
    if found["count"] != len(found["tokens"]) or not found["count"]:
        raise WrongAnswer(f"{found['count']} tokens are told, {len(found['tokens'])} came")
    return Answer({}, None, found["count"])


def _embeddings(found: Mapping[str, Any]) -> Answer:
    choices = {each["index"]: Choice(finish_reason="stop") for each in found["data"]}
    for each in found["data"]:
        norm = sum(value * value for value in each["embedding"]) ** 0.5
        if abs(norm - 1) > 1e-3:
            raise WrongAnswer(f"an embedding of norm {norm}")
    usage = found["usage"]
    return Answer(choices, {"completion_tokens": 0, **usage})


def _scores(found: Mapping[str, Any]) -> Answer:
    for each in found["data"]:
        numbers = each.get("token_logprobs")  # of likelihoods; similarities have none
        wrong = not -1.001 < each["score"] < 1.001 if numbers is None else abs(sum(numbers) - each["score"]) > 1e-3
        if wrong or (numbers is not None and (not numbers or max(numbers) > 1e-5)):
            raise WrongAnswer(f"a score of {each['score']}: {numbers}")
    choices = {each["index"]: Choice(finish_reason="stop") for each in found["data"]}
    return Answer(choices, {"completion_tokens": 0, **found["usage"]})


def _response(found: Mapping[str, Any]) -> Answer:
    reasons = {"completed": "stop", "incomplete": "length"}
    if found["status"] not in reasons:
        raise WrongAnswer(f"status {found['status']!r}")
    parts = [part for item in found["output"] for part in item.get("content") or ()]
    text = "".join(part.get("text") or "" for part in parts)
    return Answer({0: Choice(text, reasons[found["status"]])}, _renamed(found["usage"]))


def _response_events(events: Sequence[Mapping[str, Any]]) -> Answer:
    if [each["sequence_number"] for each in events] != list(range(len(events))):
        raise WrongAnswer("the sequence numbers do not count the events")
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise WrongAnswer(f"the last of {len(events)} events does not complete the response")
    answer = _response(events[-1]["response"])
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    if text != answer.choices[0].text:
        raise WrongAnswer("the deltas do not add up to the response's text")
    return answer


def _message(found: Mapping[str, Any]) -> Answer:
    text = "".join(part.get("text") or "" for part in found["content"])
    return Answer({0: Choice(text, _stop_reason(found["stop_reason"]))}, _renamed(found["usage"]))


def _message_events(events: Sequence[Mapping[str, Any]]) -> Answer:
    kinds = [each["type"] for each in events]
    if not kinds or kinds[0] != "message_start" or kinds[-1] != "message_stop":
        raise WrongAnswer(f"the stream of {len(kinds)} events does not go from message_start to message_stop")
    (last,) = (each for each in events if each["type"] == "message_delta")
    usage = {**events[0]["message"]["usage"], **last["usage"]}
    deltas = (each["delta"] for each in events if each["type"] == "content_block_delta")
    text = "".join(delta.get("text") or "" for delta in deltas)
    return Answer({0: Choice(text, _stop_reason(last["delta"]["stop_reason"]))}, _renamed(usage))


def _stop_reason(reason: str) -> str:
    return {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}.get(reason, reason)


def _renamed(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Usage of the endpoints that speak of input and output. Anthropic's input leaves out what was cached."""
    cached = usage.get("cache_read_input_tokens") or 0
    num_prompt, num_output = usage["input_tokens"] + cached, usage["output_tokens"]
    total = usage.get("total_tokens", num_prompt + num_output)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}


_READERS = {
    "/tokenize": _tokens,
    "/v1/embeddings": _embeddings,
    "/v1/score": _scores,
    "/v1/responses": _response,
    "/v1/messages": _message,
}
