"""The soak: its requests are the same each time, its checks see what is wrong, and our server stands it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.bench.__main__ import main
from jaxinfer.bench.serve.server import ChildServer
from jaxinfer.bench.soak.answers import WrongAnswer, streamed, whole
from jaxinfer.bench.soak.cases import CHAT, COMPLETIONS, KINDS, Case, Expect, World, make_case
from jaxinfer.bench.soak.command import as_text, soak
from jaxinfer.bench.soak.forms import FORMS, has_form
from jaxinfer.bench.soak.run import Plan
from jaxinfer.bench.soak.verify import wrong_answer, wrong_error
from jaxinfer.bench.soak.watch import Sample, not_flat, sample_process

pytest.importorskip("aiohttp")

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny-llama")
FAKE = Path(__file__).with_name("fake_soak_server.py")
PATHS = {COMPLETIONS, CHAT, "/tokenize", "/v1/embeddings", "/v1/score", "/v1/responses", "/v1/messages"}
WORLD = World("tiny", frozenset(PATHS), max_model_len=512, vocab_size=288, capacity=32, seed=3)
# The model's own template says nothing of tools, and what is said in its place is longer than its context.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"
)


def test_cases_are_the_same_each_time_and_of_every_kind():
    cases = [make_case(WORLD, index) for index in range(500)]
    assert cases == [make_case(WORLD, index) for index in range(500)]
    assert make_case(replace(WORLD, seed=4), 0) != cases[0]
    assert {case.kind for case in cases} == set(KINDS)
    assert len({case.behaviour for case in cases}) == 9
    for case in cases:
        json.dumps(case.described())
        prompt = case.body.get("prompt")
        if case.expect.status == 200 and isinstance(prompt, list):
            for each in prompt if isinstance(prompt[0], list) else [prompt]:
                assert 1 <= len(each) < WORLD.max_model_len and max(each) < WORLD.vocab_size


def test_kinds_are_those_that_the_server_can_answer():
    world = replace(WORLD, paths=frozenset({COMPLETIONS}), without=frozenset({"burst"}))
    kinds = {make_case(world, index).kind for index in range(200)}
    assert "completion" in kinds and not kinds & {"chat", "responses", "messages", "embeddings", "bad", "burst"}
    assert {make_case(WORLD, index, ("bad",)).kind for index in range(9)} == {"bad"}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("person", '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7.5}'),
        ("person", '{"age": 7, "name": ""}', '{"name": "Ann"}'),
        ("numbers", "[1, 2]", "[1, 10]"),
        ("object", '{"a": []}', "[]"),
        ("date", "2024-02-31", "2024-2-1"),
        ("words", "ab cd", "AB"),
        ("choice", "no", "no "),
        ("grammar", "((a))", "((a)"),
        ("regex:ab[0-9]{1,3}", "ab12", "ab"),
    ],
)
def test_forms_tell_texts_apart(name, good, bad):
    assert has_form(name, good) and not has_form(name, bad) and not has_form(name, good + "\x00")


def test_every_form_is_tried():
    tried = {test[0] for test in test_forms_tell_texts_apart.pytestmark[0].args[1]}
    assert set(FORMS) <= tried


GOOD = {
    "choices": [
        {
            "index": 0,
            "text": "once b",
            "finish_reason": "length",
            "token_ids": [1, 2],
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -0.5]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
EXPECT = Expect(num_choices=1, prompt_tokens=3, max_tokens=2, exact=True, logprobs=True, echo="once")
ASKED = Case(7, "completion", COMPLETIONS, {"prompt": [1, 2, 3]}, EXPECT)


def wrong(case, found):
    return list(wrong_answer(case, whole(case.path, json.dumps(found).encode())))


def changed(**changes):
    """The good answer with changes of its choice, or of its usage."""
    choice, usage = dict(GOOD["choices"][0]), dict(GOOD["usage"])
    for name, value in changes.items():
        (usage if name in usage or name == "prompt_tokens_details" else choice)[name] = value
    return {"choices": [choice], "usage": usage}


def test_a_good_answer_is_good():
    assert wrong(ASKED, GOOD) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({**GOOD, "choices": []}, "choices []"),
        ({**GOOD, "usage": None}, "no usage"),
        (changed(finish_reason="abort"), "finish_reason 'abort'"),
        (changed(finish_reason=None), "finish_reason None"),
        (changed(text="b"), "does not begin with the prompt"),
        (changed(token_ids=[1, 2, 3]), "3 tokens of 2"),
        (changed(token_ids=[1]), "1 tokens of 2"),
        (changed(logprobs=None), "None log-probabilities"),
        (changed(logprobs={"tokens": ["a", "b"], "token_logprobs": [-1.0, 0.5]}), "is none"),
        (changed(logprobs={"tokens": ["a"], "token_logprobs": [-1.0]}), "of 1 tokens came, 2 are told"),
        (changed(total_tokens=6), "usage"),
        (changed(prompt_tokens=4, total_tokens=6), "4 prompt tokens are told, 3"),
        (changed(completion_tokens=1, total_tokens=4), "1 tokens are told, 2 were asked for"),
        (changed(prompt_tokens_details={"cached_tokens": 9}), "9 cached tokens of 3"),
        (changed(prompt_logprobs=[None, {}]), "2 entries of prompt_logprobs for 3"),
        (changed(message={"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}), "not given"),
    ],
)
def test_wrong_answers_are_seen(found, words):
    assert any(words in each for each in wrong(ASKED, found)), wrong(ASKED, found)


def test_the_form_counts_where_a_choice_ended_by_itself():
    case = Case(0, "form", COMPLETIONS, {}, Expect(form="choice", num_choices=1))
    answer = {"choices": [{"index": 0, "text": "perhaps", "finish_reason": "stop"}], "usage": GOOD["usage"]}
    assert "has not the form choice" in wrong(case, answer)[0]
    answer["choices"][0]["finish_reason"] = "length"
    assert wrong(case, answer) == []


@pytest.mark.parametrize(
    ("calls", "good"),
    [
        ([("add", '{"a": 1, "b": 3}')], True),
        ([("now", "{}")], False),
        ([("add", '{"a": 1, "b": 4}')], False),
        ([("add", '{"a": 1, "b"')], False),
        ([("add", "3")], False),
        ([], False),
    ],
)
def test_forced_calls_are_checked(calls, good):
    expect = Expect(num_choices=1, reasons=frozenset({"tool_calls"}), calls="add")
    told = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    choice = {"index": 0, "message": {"content": None, "tool_calls": told}, "finish_reason": "tool_calls"}
    found = {"choices": [choice], "usage": GOOD["usage"]}
    assert (wrong(Case(0, "tools", CHAT, {"tools": []}, expect), found) == []) == good


def error(status, headers=None, expect=None, **fields):
    body = {"error": {"message": "no", "type": "t", "param": "n", "code": "c", **fields}}
    case = Case(0, "bad", COMPLETIONS, {}, expect or Expect(status=400, param="n", code="c"))
    return wrong_error(case, status, headers or {}, json.dumps(body).encode())


def test_errors_are_held_to_their_status_param_and_code():
    assert error(400) is None
    assert "not 400" in error(404)
    assert "HTTP 503" in error(503)
    assert "param 'm'" in error(400, param="m")
    assert "code None" in error(400, code=None)
    assert "shape" in error(400, message="")
    assert error(429, {"Retry-After": "2"}) is None
    assert "Retry-After ''" in error(429) and "'0'" in error(429, {"Retry-After": "0"})
    assert "not 400" in error(429, {"Retry-After": "2"}, Expect(status=400, may_be_full=False))
    assert "shape" in wrong_error(ASKED, 400, {}, b"<html>")
    anthropic = {"type": "error", "error": {"type": "t", "message": "m"}}
    assert (
        wrong_error(Case(0, "", "/v1/messages", {}, Expect(status=400)), 400, {}, json.dumps(anthropic).encode())
        is None
    )


def chunk(text="a", reason=None, **more):
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more}).encode()


def test_a_stream_is_put_together():
    usage = json.dumps({"choices": [], "usage": GOOD["usage"]}).encode()
    answer = streamed(COMPLETIONS, [chunk("a"), chunk("b", "stop"), usage, b"[DONE]"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage == GOOD["usage"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "[DONE]"),
        ([chunk("a", "stop")], "[DONE]"),
        ([chunk("a", "stop"), b"[DONE]", b"[DONE]"], "after [DONE]"),
        ([chunk("a", "stop"), chunk("b", "stop"), b"[DONE]"], "goes on after"),
        ([b'{"error": {"message": "failed"}}', b"[DONE]"], "error in the stream"),
        ([b'{"choices": [{"te', b"[DONE]"], "JSONDecodeError"),
        ([b'{"choices": [], "usage": {"x": 1}}', chunk("a"), b"[DONE]"], "after that of the usage"),
    ],
)
def test_broken_streams_are_seen(events, words):
    with pytest.raises(WrongAnswer, match=words.replace("[", r"\[")):
        streamed(COMPLETIONS, events)


def encoded(*events):
    return [json.dumps(event).encode() for event in events]


def test_streams_of_responses():
    output = [{"content": [{"type": "output_text", "text": "ab"}]}]
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    deltas = [{"type": "response.output_text.delta", "delta": each} for each in "ab"]
    end = {"type": "response.completed", "response": {"status": "completed", "output": output, "usage": usage}}
    events = [{**each, "sequence_number": number} for number, each in enumerate([*deltas, end])]
    answer = streamed("/v1/responses", encoded(*events))
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    for broken in (events[1:], events[:2], [events[0], {**events[2], "sequence_number": 1}]):
        with pytest.raises(WrongAnswer):
            streamed("/v1/responses", encoded(*broken))


def test_streams_of_messages():
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 2}}}
    text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    last = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}}
    events = [start, text, last, {"type": "message_stop"}]
    answer = streamed("/v1/messages", encoded(*events))
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a", "length")
    for broken in (events[:3], events[1:], [start, {"type": "message_stop"}]):
        with pytest.raises(WrongAnswer):
            streamed("/v1/messages", encoded(*broken))


def test_embeddings_have_norm_one():
    found = {"data": [{"index": 0, "embedding": [0.6, 0.8]}], "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    case = Case(0, "embeddings", "/v1/embeddings", {}, Expect(num_choices=1, prompt_tokens=2))
    assert wrong(case, found) == []
    assert wrong(replace(case, expect=Expect(num_choices=2)), found)
    found["data"][0]["embedding"] = [0.6, 0.7]
    with pytest.raises(WrongAnswer, match="norm"):
        wrong(case, found)


def test_scores_are_within_their_range():
    case = Case(0, "score", "/v1/score", {}, Expect(num_choices=1))
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    similar, likely = {"index": 0, "score": 0.5}, {"index": 0, "score": -3.0, "token_logprobs": [-1.0, -2.0]}
    for good in (similar, likely):
        assert wrong(case, {"data": [good], "usage": usage}) == []
    for bad in ({"score": 1.5}, {**likely, "score": -2.0}, {"score": 1.0, "token_logprobs": [1.0]}):
        with pytest.raises(WrongAnswer, match="score"):
            wrong(case, {"data": [{**similar, **bad}], "usage": usage})


def samples(rss_mib, num_threads=None):
    return [Sample(float(at), mib << 20, 10, num_threads and num_threads[at]) for at, mib in enumerate(rss_mib)]


def test_growth_counts_after_the_warm_up():
    assert not_flat(samples([100, 300, 400, 400, 400, 401, 399, 400])) == []
    assert not_flat(samples(range(400, 480, 5))) and "MiB" in not_flat(samples(range(400, 480, 5)))[0]
    assert not_flat(samples([400] * 4 + [401] * 8 + [500, 400, 401, 400])) == [], "one peak is no growth"
    assert not_flat(samples([400] * 16, list(range(10, 26)))) == [
        "threads grew from 15.5 to 23.5, 4 more are tolerated"
    ]
    assert not_flat(samples([1, 10**6])) == [], "too few to tell"


def test_this_process_can_be_watched():
    import os

    sample = sample_process(os.getpid())
    assert sample is not None and sample.rss_bytes > 1 << 20 and sample.num_files > 2 and sample.num_threads
    assert sample_process(2**22 + 1) is None


def run_fake(*faults, **plan):
    arguments = [sys.executable, str(FAKE), "--faults", ",".join(faults)]
    kinds = ("repeat", "burst", "abort", "leave", "half a body", "garbage")
    settings = {"concurrency": 8, "kinds": kinds, "idle_limit_s": 5, "sample_interval_s": 0.05, **plan}
    with ChildServer([], arguments) as child:
        model, results = asyncio.run(soak(child.base_url, Plan(1.5, **settings), child))
    assert model == "fake"
    return results


def failed(results):
    return {check["name"] for check in results["checks"] if check["num_failed"]}


def told(results):
    return "\n".join(fault["what"] for check in results["checks"] for fault in check["faults"])


def test_a_good_server_passes():
    results = run_fake()
    assert failed(results) == set(), results["checks"]
    names = {check["name"] for check in results["checks"] if check["num_checked"]}
    assert len(names) == 11 and results["kinds"]["repeat"] and results["results"]["HTTP 429"]


def test_a_server_that_keeps_things_is_caught():
    lost = ("pages", "files", "threads", "memory", "place")
    results = run_fake(*lost, "failed step", "hidden 500", "traceback", "exit", idle_limit_s=2.5)
    assert failed(results) == {
        "an idle server holds nothing",
        "memory and threads are flat",
        "files are closed",
        "every place is free again",
        "its log has no traceback",
        "it ends with exit code 0",
    }
    text = told(results)
    for words in ("pages_used is 1", "num_failed_steps", 'status="500"', "memory grew", "threads grew", "code 3"):
        assert words in text, words


def test_a_server_that_answers_wrongly_is_caught():
    results = run_fake("500", "no retry-after", "no done", "no id")
    assert {"answers are in order", "a drain loses nothing"} <= failed(results)
    text = told(results)
    for words in ("HTTP 500", "429 with Retry-After ''", "[DONE]", "X-Request-Id"):
        assert words in text, words
    fault = results["checks"][0]["faults"][0]
    assert fault["request"]["body"]["prompt"] and fault["request"]["path"] == COMPLETIONS


def test_a_server_that_forgets_is_caught():
    results = run_fake("other tokens", "lost at the end")
    assert failed(results) == {"same request, same tokens", "a drain loses nothing"}
    assert "no answer: " in told(results)


def test_a_server_that_dies_ends_the_soak():
    with pytest.raises(RuntimeError, match="the server ended with 7 while request [0-9]+ ran"):
        run_fake("death")


def test_requests_can_be_sent_again():
    results = run_fake("other tokens", only=(3, 4, 5))
    assert results["num_requests"] <= 6 + 3 * 48 and results["duration_s"] < 10


def soaked(capsys, *flags):
    begin = ["soak", "--model", TINY, "--json", "--server-args", f"--chat-template '{TEMPLATE}'"]
    code = main([*begin, *flags])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, as_text(report)
    return report


@pytest.mark.slow
def test_a_short_soak_of_the_tiny_model(capsys):
    report = soaked(capsys, "--minutes", "0.12", "--seed", "5")
    assert report["results"]["results"]["answered"] > 10
    assert report["results"]["kinds"]["tools"], "the template has room for them"
    assert "answers are in order" in as_text(report)


@pytest.mark.slow
def test_a_minute_of_the_tiny_model(capsys):
    report = soaked(capsys, "--minutes", "1", "--seed", "6")
    assert report["results"]["results"]["answered"] > 100 and report["results"]["process"]["rss_mib"][0] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--minutes", "0"], "--minutes"),
        (["--concurrency", "0"], "--concurrency"),
        (["--base-url", "http://127.0.0.1:1", "--model", "x"], "--base-url"),
        (["--base-url", "nowhere"], "http://"),
        (["--base-url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, flags, words):
    assert main(["soak", *flags]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ") and words in line and "\n" not in line
