"""AsyncLLM from many tasks in several threads at once: the tokens of LLM, nothing left behind, and an end in time."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams

SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "page_size": 4,
    "dtype": "float32",
    "verbose": False,
}
PROMPTS = ["hello there", "abc", "some words, and more of them", "x", "1 2 3 4"]
KINDS = ["generate", "choices", "stream", "chat", "abort", "leave", "cancel", "timeout", "wait_for", "refused"]
NUM_THREADS, NUM_TASKS = 4, 10
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def wait_until(condition, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def own_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("jaxinfer")}


def kind_of(index):
    return KINDS[index % len(KINDS)]


def request(index):
    """A prompt and params; what they give depends on nothing else, since they have a seed."""
    num_choices = 2 if kind_of(index) == "choices" else 1
    text = PROMPTS[index % 7 % len(PROMPTS)]
    count = 30 if kind_of(index) == "abort" else 5 + index % 15
    params = SamplingParams(n=num_choices, seed=index, max_tokens=count, ignore_eos=True, logprobs=1)
    return text + (" " if kind_of(index) == "chat" else ""), params


def options(index):
    return {"priority": index % 3 - 1, "tenant": "abc"[index % 3]}


async def last_of(outputs):
    last = None
    async for output in outputs:
        last = output
    return last


def check_part(output, whole):
    """The request ended early, or just in time: what it has is how the whole begins."""
    if output is not None:
        for choice, expected in zip(output.outputs, whole.outputs, strict=True):
            count = len(choice.token_ids)
            assert choice.token_ids == expected.token_ids[:count] and choice.logprobs == expected.logprobs[:count]
            assert expected.text.startswith(choice.text.removesuffix("\ufffd"))


async def use(llm, index, whole):
    """One request, from its beginning to its end, as its kind has it. Returns its finish reason, if it has one."""
    kind, (text, params) = kind_of(index), request(index)
    prompt = {"prompt": text, "cache_salt": ["", "one", "two"][index % 4 % 3]}
    await asyncio.sleep(index % 5 / 200)
    if kind == "stream":
        assert "".join([piece async for piece in llm.stream(prompt, params, **options(index))]) == whole.outputs[0].text
        return None
    if kind == "refused":
        with pytest.raises(ValueError, match="prompt is empty"):
            await last_of(llm.generate("", params, **options(index)))
        return None
    if kind == "chat":
        messages = [{"role": "user", "content": text.removesuffix(" ")}]
        output = await last_of(llm.chat(messages, params, cache_salt="chat", **options(index)))
        assert output.outputs == whole.outputs
        return None
    timeout_s = (1e-6, 0.03)[index // len(KINDS) % 2] if kind == "timeout" else 100.0
    outputs = llm.generate(prompt, params, f"request {index}", timeout_s=timeout_s, **options(index))
    if kind in ("generate", "choices"):
        output = await last_of(outputs)
        assert (output.outputs, output.finished) == (whole.outputs, True)
        return None
    output = await end_early(llm, kind, index, outputs)
    check_part(output, whole)
    return None if output is None else output.outputs[0].finish_reason


async def end_early(llm, kind, index, outputs):
    if kind == "timeout":
        return await last_of(outputs)
    if kind == "abort":
        first = await anext(outputs)
        await llm.abort(f"request {index}")
        return await last_of(outputs) or first
    if kind == "leave":
        first = await anext(outputs)
        await outputs.aclose()
        return first
    if kind == "cancel":
        task = asyncio.create_task(last_of(outputs))
        await asyncio.sleep(index % 4 / 100)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        return None if isinstance(ended, asyncio.CancelledError) else ended
    try:
        return await asyncio.wait_for(last_of(outputs), 0.02)
    except TimeoutError:
        return None


def check_each_step(engine):
    """The engine's integrity after each of its steps; a failure ends the requests with it."""
    step = engine.step

    def checked():
        moved = step()
        engine.scheduler.check_integrity()
        return moved

    engine.step = checked


def test_many_tasks_of_several_threads_at_once(tiny_model_path):
    numbers, others = range(NUM_THREADS * NUM_TASKS), own_threads()
    with LLM(str(tiny_model_path), **SETTINGS) as sync:
        prompts, params = zip(*map(request, numbers), strict=True)
        wholes = sync.generate(list(prompts), list(params))
    llm = AsyncLLM(str(tiny_model_path), **SETTINGS, num_pages=17, tenant_weights={"a": 2.0})
    engine, driver = llm._llm.engine, llm._driver
    check_each_step(engine)

    async def in_thread(number):
        mine = [index for index in numbers if index % NUM_THREADS == number]
        done = asyncio.gather(*(use(llm, index, wholes[index]) for index in mine))
        while not done.done():
            assert 0 <= llm.stats()["pages_used"] <= 17
            await asyncio.sleep(0.02)
        return await done

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        reasons = [
            each
            for found in threads.map(lambda number: asyncio.run(in_thread(number)), range(NUM_THREADS))
            for each in found
        ]
    assert {"timeout", "abort"} <= set(reasons)
    wait_until(lambda: llm.stats()["num_running"] == llm.stats()["queue_len"] == 0)
    stats = llm.stats()
    assert stats["pages_used"] == 0
    engine.scheduler.check_integrity()
    assert (driver._mailboxes, driver._expected, engine._live, engine._state_of) == ({}, [], {}, {})
    llm.close()
    wait_until(lambda: own_threads() <= others)


def test_closing_ends_the_waiters_of_every_thread(tiny_model_path):
    """Some have begun, some wait for a row, and some have just been asked for; a step runs that takes its time."""
    others, llm = own_threads(), AsyncLLM(str(tiny_model_path), **SETTINGS)
    step, stepping, ended_s, step_s = llm._llm.engine.step, threading.Event(), [], []

    def slow_step():
        stepping.set()
        time.sleep(0.2)
        step_s.append(time.monotonic())
        return step()

    async def reader(prompt):
        try:
            await last_of(llm.generate(prompt, LONG))
        except RuntimeError as error:
            ended_s.append(time.monotonic())
            return str(error)

    async def in_thread():
        return await asyncio.gather(*(reader(prompt) for prompt in PROMPTS))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        futures = [threads.submit(lambda: asyncio.run(in_thread())) for _ in range(3)]
        wait_until(lambda: llm._driver._mailboxes)
        llm._llm.engine.step = slow_step
        stepping.wait(10)
        futures.append(threads.submit(lambda: asyncio.run(in_thread())))
        time.sleep(0.05)
        llm.close()
        closed_s = time.monotonic()
        errors = [error for future in futures for error in future.result(10)]
    assert len(errors) == 4 * len(PROMPTS) and all("closed" in error for error in errors)
    assert max(*ended_s, closed_s) < step_s[-1] + 5  # soon after a step, on a machine that is busy
    del llm, step, slow_step
    gc.collect()
    wait_until(lambda: own_threads() <= others)
