"""priority, tenant, cache_salt and timeout_s through every door of LLM and AsyncLLM, each by its effect."""

from __future__ import annotations

import asyncio
import itertools
import math
import time

import pytest
from jaxtyping import config

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.request import RequestOptions

SETTINGS = {  # one row, so that whoever goes first is seen
    "max_model_len": 64,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 200,
    "dtype": "float32",
    "verbose": False,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SHORT = SamplingParams(max_tokens=5, **GREEDY)
LONG = SamplingParams(max_tokens=40, **GREEDY)
DOORS = ["generate", "chat", "async generate", "async chat"]
STREAMS = ["stream", "async stream"]
CALLS = itertools.count()
BAD = {
    "priority": [1.5, True, None, "1", 2**31],
    "tenant": [5, None, b"a"],
    "cache_salt": [5, None, b"a"],
    "timeout_s": [0, -1, math.nan, math.inf, "1", True, [1, 2]],
}


@pytest.fixture(scope="module")
def llm(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_llm(tiny_model_path):
    llm = AsyncLLM(str(tiny_model_path), **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture
def engine_of(llm, async_llm):
    return lambda door: async_llm._llm.engine if door.startswith("async") else llm.engine


@pytest.fixture(autouse=True)
def nothing_leaks(engine_of):
    yield
    for door in ("generate", "async generate"):
        engine, end_s = engine_of(door), time.monotonic() + 10
        while engine.has_work and time.monotonic() < end_s:
            time.sleep(0.005)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        assert (stats["pages_used"], stats["num_running"], stats["queue_len"]) == (0, 0, 0)


@pytest.fixture
def slow(engine_of, monkeypatch):
    """Makes every step of a door's engine take 10 ms longer."""

    def make(door):
        engine, step = engine_of(door), engine_of(door).step

        def slow_step():
            time.sleep(0.01)
            return step()

        monkeypatch.setattr(engine, "step", slow_step)

    return make


@pytest.fixture
def ask(llm, async_llm):
    """`ask(door, texts, params, **options)`: all texts at once; an option is one value or a list of one for each."""

    def prompts_of(texts, salts):
        return [{"prompt": text, "cache_salt": salt} for text, salt in zip(texts, salts, strict=True)]

    async def last_of(outputs):
        *_, last = [output async for output in outputs]
        return last

    async def at_once(calls):
        return await asyncio.gather(*(last_of(call()) for call in calls))

    def ask(door, texts, params, cache_salt=None, **options):
        salt = f"call {next(CALLS)}" if cache_salt is None else cache_salt
        salts = salt if isinstance(salt, list) else [salt] * len(texts)
        conversations = [[{"role": "user", "content": text}] for text in texts]
        if door == "generate":
            return llm.generate(prompts_of(texts, salts), params, **options)
        if door == "chat":
            return llm.chat(conversations, params, cache_salt=salts, **options)
        columns = {name: value if isinstance(value, list) else [value] * len(texts) for name, value in options.items()}
        each = [{name: values[index] for name, values in columns.items()} for index in range(len(texts))]
        calls = []
        for prompt, conversation, own in zip(prompts_of(texts, salts), conversations, each, strict=True):
            if door == "async generate":
                calls.append(lambda prompt=prompt, own=own: async_llm.generate(prompt, params, **own))
            else:
                own["cache_salt"] = prompt["cache_salt"]
                calls.append(lambda messages=conversation, own=own: async_llm.chat(messages, params, **own))
        return asyncio.run(at_once(calls))

    return ask


@pytest.fixture
def read(llm, async_llm):
    """`read(door, text, params, **options)`: the pieces of a stream."""

    async def pieces_of(prompt, params, options):
        return [piece async for piece in async_llm.stream(prompt, params, **options)]

    def read(door, text, params, cache_salt="", **options):
        prompt = {"prompt": text, "cache_salt": cache_salt}
        if door == "stream":
            return list(llm.stream(prompt, params, **options))
        return asyncio.run(pieces_of(prompt, params, options))

    return read


def order_of(outputs):
    """Indices of requests that came together, in the order in which they finished."""
    return sorted(range(len(outputs)), key=lambda index: outputs[index].metrics["e2e_s"])


@pytest.mark.parametrize("door", [*DOORS, *STREAMS])
def test_every_door_hands_all_options_on(ask, read, engine_of, monkeypatch, door):
    engine, found = engine_of(door), []
    add = engine.add

    def spy(*arguments, **named):
        found.append(next(each for each in [*arguments, *named.values()] if isinstance(each, RequestOptions)))
        add(*arguments, **named)

    monkeypatch.setattr(engine, "add", spy)
    options = {"priority": -3, "tenant": "somebody", "cache_salt": "own", "timeout_s": 77}
    read(door, "abc", SHORT, **options) if door in STREAMS else ask(door, ["abc"], SHORT, **options)
    assert found == [RequestOptions(**options)]


@pytest.mark.parametrize("door", DOORS)
def test_lower_priorities_go_first(ask, slow, door):
    slow(door)
    texts = ["abc", "def", "ghi"]
    plain = ask(door, texts, SHORT)
    assert order_of(plain) == [0, 1, 2]
    outputs = ask(door, texts, SHORT, priority=[1, 0, -1])
    assert order_of(outputs) == [2, 1, 0]
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]


def test_a_stream_gives_way_to_a_lower_priority_and_goes_on(llm):
    whole = "".join(llm.stream("hello", LONG))
    before = llm.stats()["num_preemptions"]
    for priority, num_preempted in ((0, 0), (5, 1)):
        stream = llm.stream("hello", LONG, priority=priority)
        text = next(stream)
        llm.generate("urgent", SHORT, priority=1)
        assert text + "".join(stream) == whole
        assert llm.stats()["num_preemptions"] - before == num_preempted


@pytest.mark.parametrize("door", DOORS)
def test_a_tenant_does_not_wait_for_all_requests_of_another(ask, slow, door):
    slow(door)
    texts = ["abc", "def", "ghi", "jkl", "mno"]
    assert order_of(ask(door, texts, SHORT))[-1] == 4
    outputs = ask(door, texts, SHORT, tenant=[*["many"] * 4, "few"])
    assert order_of(outputs).index(4) <= 2


@pytest.mark.parametrize("door", DOORS)
def test_a_timeout_ends_a_request_with_what_it_has(ask, slow, door):
    (whole,) = ask(door, ["hello"], LONG)
    slow(door)
    start_s = time.monotonic()
    (output,) = ask(door, ["hello"], LONG, timeout_s=0.2)
    assert time.monotonic() - start_s >= 0.2 and output.metrics["e2e_s"] >= 0.2
    choice, expected = output.outputs[0], whole.outputs[0]
    assert output.finished and (choice.finish_reason, choice.stop_reason) == ("timeout", None)
    assert 0 < len(choice.token_ids) < 40 and choice.token_ids == expected.token_ids[: len(choice.token_ids)]
    assert choice.text and expected.text.startswith(choice.text)
    (timely,) = ask(door, ["hello"], SHORT, timeout_s=100)
    assert timely.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("door", DOORS)
def test_a_timeout_counts_the_wait(ask, slow, door):
    """The second choice never gets the row, nor does the second request, unless it came later and ends later."""
    slow(door)
    outputs = ask(door, ["abc", "def"], SamplingParams(max_tokens=40, n=2, **GREEDY), timeout_s=0.2)
    assert [choice.finish_reason for output in outputs for choice in output.outputs] == ["timeout"] * 4
    counts = [len(choice.token_ids) for output in outputs for choice in output.outputs]
    assert counts[0] > 0 and counts[1] == counts[3] == 0
    second = outputs[1].metrics
    assert counts[2] == 0 or second["e2e_s"] < second["queue_s"] + 0.2
    assert len(ask(door, ["ghi"], SHORT)[0].outputs[0].token_ids) == 5


def test_a_timeout_before_the_first_step_is_no_failed_step(llm, caplog):
    """Nothing runs any more then, which is no error; the prefix cache stays."""
    llm.generate("what stays in the cache", SHORT)
    num_cached = llm.stats()["pages_cached"]
    (output,) = llm.generate("hello", LONG, timeout_s=1e-9)
    assert output.outputs[0].finish_reason == "timeout"
    assert llm.stats()["pages_cached"] == num_cached > 0 and not caplog.records


def test_the_best_of_a_timeout_are_choices_that_have_begun(llm, slow):
    slow("generate")
    (output,) = llm.generate("hello", SamplingParams(n=2, best_of=3, max_tokens=40, **GREEDY), timeout_s=0.2)
    assert [len(choice.token_ids) > 0 for choice in output.outputs] == [True, False]


@pytest.mark.parametrize("door", STREAMS)
def test_a_timeout_ends_a_stream(read, slow, door):
    whole = "".join(read(door, "hello", LONG))
    slow(door)
    text = "".join(read(door, "hello", LONG, timeout_s=0.2))
    assert 0 < len(text) < len(whole) and whole.startswith(text)


@pytest.mark.parametrize("door", DOORS)
def test_cached_tokens_are_reported_and_salts_keep_them_apart(ask, door):
    text = "a prompt of more than two pages"
    counts = []
    salts = [f"{door}{name}" for name in ("one", "one", "other", "one", "other")]
    for salt in salts:
        (output,) = ask(door, [text], SHORT, cache_salt=salt)
        counts.append(output.num_cached_tokens)
    all_but_last = len(output.prompt_token_ids) - 1
    assert counts == [0, all_but_last, 0, all_but_last, all_but_last]
    together = ask(door, [text] * 3, SHORT, cache_salt=[f"{door}new", f"{door}new", f"{door}newer"])
    assert sorted(output.num_cached_tokens for output in together) == [0, 0, all_but_last]


@pytest.fixture
def unchecked():
    """Users run without the checks of types that tests run under."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("door", [*DOORS, *STREAMS])
def test_bad_values_are_refused_by_name(llm, async_llm, unchecked, door):
    def call(cache_salt="", **options):
        prompt, messages = {"prompt": "abc", "cache_salt": cache_salt}, [{"role": "user", "content": "abc"}]
        match door:
            case "generate":
                llm.generate(prompt, SHORT, **options)
            case "chat":
                llm.chat(messages, SHORT, cache_salt=cache_salt, **options)
            case "stream":
                list(llm.stream(prompt, SHORT, **options))
            case "async generate":
                async_llm.generate(prompt, SHORT, **options)
            case "async chat":
                async_llm.chat(messages, SHORT, cache_salt=cache_salt, **options)
            case "async stream":
                async_llm.stream(prompt, SHORT, **options)

    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}=.* must be"):
                call(**{name: value})


def test_lists_have_an_entry_for_each_prompt(llm):
    for name, values in {"priority": [1, 2], "tenant": ["a"]}.items():
        with pytest.raises(ValueError, match=f"{name} has {len(values)} entries for 3 prompts"):
            llm.generate(["a", "b", "c"], SHORT, **{name: values})
    messages = [[{"role": "user", "content": text}] for text in "abc"]
    with pytest.raises(ValueError, match="cache_salt has 4 entries for 3 prompts"):
        llm.chat(messages, SHORT, cache_salt=["a"] * 4)


def test_a_score_keeps_to_the_salt_of_its_prompt(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        llm.score({"prompt": "a prompt of some pages", "cache_salt": "mine"}, "yes")
        cached = [
            llm.generate({"prompt": "a prompt of some pages", "cache_salt": salt}, SamplingParams(max_tokens=1))[0]
            for salt in ("", "mine")
        ]
        assert [output.num_cached_tokens > 0 for output in cached] == [False, True]
