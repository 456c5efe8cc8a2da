"""AsyncLLM: the results of LLM.generate, and nothing held by requests that end early, in any way they can."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jaxinfer import LLM, AsyncLLM, EngineDeadError, EngineError, SamplingParams
from jaxinfer.mailbox import Mailbox, check_output_kind

SETTINGS = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "page_size": 16,
    "dtype": "float32",
    "verbose": False,
}
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
PROMPTS = ["hello there", "abc", "some words, and more of them " * 2, "x", "1 2 3 4"] * 3


@pytest.fixture(scope="module")
def llm(tiny_model_path):
    llm = AsyncLLM(str(tiny_model_path), **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        wait_until(lambda: is_idle(llm))
        llm._llm.engine.scheduler.check_integrity()
        assert llm._driver._mailboxes == {}


def is_idle(llm):
    stats = llm.stats()
    return (stats["num_running"], stats["queue_len"], stats["pages_used"]) == (0, 0, 0)


def wait_until(condition, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def last_of(outputs):
    last = None
    async for output in outputs:
        last = output
    return last


def shown(output):
    return output.prompt, output.prompt_token_ids, output.outputs, output.finished


@pytest.fixture
def failing_step(llm, monkeypatch):
    """Makes the engine's next steps raise the given error."""

    def fail(error):
        def step():
            raise error

        monkeypatch.setattr(llm._llm.engine, "step", step)

    return fail


def test_many_at_once_equal_generate(llm, tiny_model_path):
    params = SamplingParams(max_tokens=12, n=2, seed=3, logprobs=2)
    with LLM(str(tiny_model_path), **SETTINGS) as sync:
        expected = sync.generate(PROMPTS, params)

    async def main():
        return await asyncio.gather(*(last_of(llm.generate(prompt, params)) for prompt in PROMPTS))

    assert [shown(output) for output in run(main())] == [shown(output) for output in expected]


def test_requests_without_a_seed_arrive_in_the_order_of_the_calls(tiny_model_path):
    params = SamplingParams(max_tokens=6)
    with LLM(str(tiny_model_path), **SETTINGS) as sync:
        expected = sync.generate(PROMPTS, params)

    async def main():
        async with AsyncLLM(str(tiny_model_path), **SETTINGS) as llm:
            return await asyncio.gather(*(last_of(llm.generate(prompt, params)) for prompt in PROMPTS))

    assert [output.outputs[0].token_ids for output in run(main())] == [o.outputs[0].token_ids for o in expected]


def test_outputs_grow_and_do_not_change_afterwards(llm):
    async def main():
        outputs, seen = [], []
        async for output in llm.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)):
            outputs.append(output)
            seen.append((output.outputs[0].text, list(output.outputs[0].token_ids), len(output.outputs[0].logprobs)))
        return outputs, seen

    outputs, seen = run(main())
    assert len(outputs) > 2 and [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output, (text, token_ids, num_logprobs) in zip(outputs, seen, strict=True):
        choice = output.outputs[0]
        assert (choice.text, choice.token_ids, len(choice.logprobs)) == (text, token_ids, num_logprobs)
        assert num_logprobs == len(token_ids) and seen[-1][1][: len(token_ids)] == token_ids
    assert len({len(token_ids) for _, token_ids, _ in seen}) == len(seen)


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_deltas_add_up_however_slowly_they_are_read(llm, pause_s):
    params = SamplingParams(max_tokens=20, n=3, seed=3, logprobs=2, stop=["a", "e"])

    async def main():
        parts = []
        async for part in llm.generate("hello", params, output_kind="delta"):
            parts.append(part)
            await asyncio.sleep(pause_s)
        finals = [output async for output in llm.generate("hello", params, output_kind="final")]
        return parts, finals

    parts, (whole,) = run(main())
    assert whole.finished and [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    for index, choice in enumerate(whole.outputs):
        pieces = [part.outputs[index] for part in parts]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert sum((piece.token_ids for piece in pieces), []) == choice.token_ids
        assert sum((piece.logprobs for piece in pieces), []) == choice.logprobs
        last = pieces[-1]
        assert (last.finish_reason, last.stop_reason) == (choice.finish_reason, choice.stop_reason)
        assert last.cumulative_logprob == choice.cumulative_logprob


def test_submit_returns_when_the_engine_has_accepted(llm):
    async def main():
        for prompt, params in [("", LONG), ("hello", SamplingParams(stop_token_ids=[10**6])), ("x" * 500, LONG)]:
            with pytest.raises(ValueError, match="prompt|stop_token_ids"):
                await llm.submit(prompt, params)
        outputs = await llm.submit("hello", LONG, "mine", output_kind="delta")
        assert llm._driver._mailboxes.keys() == {"mine"}
        with pytest.raises(ValueError, match="already running"):
            await llm.submit("hello", LONG, "mine")
        first = await anext(outputs)
        await outputs.aclose()
        await asyncio.wrap_future(llm._driver.call(lambda: None))
        return first

    assert run(main()).outputs[0].token_ids


def test_a_caller_cancelled_in_submit_leaves_nothing(llm):
    async def main():
        tasks = [asyncio.create_task(llm.submit("hello", LONG, output_kind="delta")) for _ in range(20)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        streams = await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            if not isinstance(stream, BaseException):
                await stream.aclose()
        await asyncio.wrap_future(llm._driver.call(lambda: None))
        assert llm._driver._expected == []

    run(main())


def test_unknown_output_kinds_are_refused():
    with pytest.raises(ValueError, match="output_kind='all' must be one of cumulative, delta, final"):
        check_output_kind("all")


def test_stream_and_chat(llm):
    async def main():
        pieces = [piece async for piece in llm.stream("hello", LONG)]
        whole = await last_of(llm.generate("hello", LONG))
        assert "".join(pieces) == whole.outputs[0].text and len(pieces) > 3
        chat = await last_of(llm.chat([{"role": "user", "content": "hello"}], LONG))
        assert chat.prompt_token_ids == llm.tokenizer.encode("hello ")
        with pytest.raises(ValueError, match="n=2"):
            llm.stream("hello", SamplingParams(n=2))

    run(main())


def test_slow_readers_skip_and_get_the_last(llm):
    async def main():
        outputs = llm.generate("hello", LONG)
        stream = llm.stream("hello", LONG)
        first, piece = await anext(outputs), await anext(stream)
        await asyncio.to_thread(wait_until, lambda: is_idle(llm))
        rest, pieces = [output async for output in outputs], [piece async for piece in stream]
        assert len(first.outputs[0].token_ids) < 10 and len(rest) <= 2 and len(pieces) <= 2
        assert rest[-1].finished and len(rest[-1].outputs[0].token_ids) == 100
        assert piece + "".join(pieces) == rest[-1].outputs[0].text

    run(main())


def test_abort_ends_the_reader(llm):
    async def main():
        outputs = llm.generate("hello", LONG, request_id="one")
        await anext(outputs)
        await llm.abort("one")
        assert is_idle(llm)
        *_, last = [output async for output in outputs]
        assert last.finished and last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) < 100
        await llm.abort("unknown")
        stream = llm.stream("hello", LONG, request_id="two")
        await anext(stream)
        await llm.abort("two")
        assert len("".join([piece async for piece in stream])) < 100

    run(main())


@pytest.mark.parametrize("how", ["close", "break", "cancel", "cancel at once", "time out"])
def test_readers_that_leave_abort_their_request(llm, how):
    async def leave_early(stop_after):
        async for output in llm.generate("hello", LONG):
            if len(output.outputs[0].token_ids) >= stop_after:
                break

    async def main():
        if how == "close":
            outputs = llm.generate("hello", LONG)
            await anext(outputs)
            await outputs.aclose()
        elif how == "break":
            await leave_early(2)
        elif how == "time out":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(last_of(llm.generate("hello", SamplingParams(n=8, max_tokens=100))), 0.01)
        else:
            tasks = [asyncio.create_task(leave_early(1000)) for _ in range(20)]
            await asyncio.sleep(0.02 if how == "cancel" else 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        before = llm.stats()["num_computed_tokens"]
        await asyncio.to_thread(wait_until, lambda: is_idle(llm))
        assert llm.stats()["num_computed_tokens"] - before < 60
        assert (await last_of(llm.generate("abc", SamplingParams(max_tokens=3)))).finished

    run(main())


def test_bad_requests_reach_only_their_caller(llm):
    async def refused(outputs, message):
        with pytest.raises(ValueError, match=message):
            await last_of(outputs)

    async def main():
        good = llm.generate("hello", LONG, request_id="good")
        await anext(good)
        stranger = Mailbox(asyncio.get_running_loop(), "good", "cumulative")  # one that had this id before
        await asyncio.wrap_future(llm._driver.call(lambda: llm._driver._forget(stranger)))
        await asyncio.gather(
            refused(llm.generate("hello", LONG, request_id="good"), "'good' is already running"),
            refused(llm.generate("x" * 200), "max_model_len=128"),
            refused(llm.generate(""), "prompt is empty"),
            refused(llm.generate({"text": "x"}), "a prompt needs"),
            refused(llm.generate({"prompt_token_ids": [112]}), "token id 112"),
            refused(llm.chat([]), "messages"),
        )
        assert len((await last_of(good)).outputs[0].token_ids) == 100

    run(main())


def test_a_failing_step_reaches_every_reader(llm, failing_step, monkeypatch):
    async def main():
        readers = [asyncio.create_task(last_of(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        readers.append(asyncio.create_task(last_of(llm.stream("hello", LONG))))
        await asyncio.sleep(0.02)
        failing_step(ValueError("broken"))
        errors = await asyncio.gather(*readers, return_exceptions=True)
        assert all(type(error) is EngineError and "broken" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == len(errors)
        monkeypatch.undo()
        assert (await last_of(llm.generate("abc", LONG))).finished

    run(main())


def test_a_dead_engine_refuses_everything(tiny_model_path):
    async def main():
        async with AsyncLLM(str(tiny_model_path), **SETTINGS) as llm:
            running = llm.generate("hello", LONG)
            await anext(running)
            llm._llm.engine._failure = "out of memory"
            for each in (last_of(running), last_of(llm.generate("hello")), last_of(llm.generate("hello"))):
                with pytest.raises(EngineDeadError, match="out of memory"):
                    await each

    run(main())


def test_closing_while_requests_run(tiny_model_path):
    llm = AsyncLLM(str(tiny_model_path), **SETTINGS)
    engine, thread = weakref.ref(llm._llm.engine), llm._driver._thread

    async def main():
        readers = [asyncio.create_task(last_of(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        await asyncio.sleep(0.02)
        readers += [asyncio.create_task(last_of(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        await asyncio.sleep(0)
        await llm.aclose()
        ended = await asyncio.gather(*readers, return_exceptions=True)
        assert all(type(error) is RuntimeError and "closed" in str(error) for error in ended)
        for call in (llm.abort("x"), last_of(llm.generate("hello")), last_of(llm.stream("hello"))):
            with pytest.raises(RuntimeError, match="closed"):
                await call
        with pytest.raises(RuntimeError, match="closed"):
            llm.stats()
        await llm.aclose()

    run(main())
    gc.collect()
    assert not thread.is_alive() and engine() is None and "closed" in repr(llm)


def test_one_that_is_dropped_ends_its_thread(tiny_model_path):
    llm = AsyncLLM(str(tiny_model_path), **SETTINGS)
    engine, thread = weakref.ref(llm._llm.engine), llm._driver._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_several_loops_one_after_another_and_at_once(llm):
    expected = run(last_of(llm.generate("hello", LONG))).outputs
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(last_of(llm.generate("hello", LONG))))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [output.outputs for output in found] == [expected] * 2


def test_a_reader_whose_loop_is_gone_is_dropped(llm):
    loop = asyncio.new_event_loop()
    outputs = llm.generate("hello", LONG)
    loop.run_until_complete(anext(outputs))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    wait_until(lambda: is_idle(llm))
    with pytest.raises(StopIteration):  # closed by hand, since its loop can no longer do it
        outputs.aclose().send(None)


def test_the_thread_sleeps_without_work(llm):
    run(last_of(llm.generate("hello", LONG)))
    time.sleep(0.05)
    before_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before_s < 0.1


def test_unknown_settings_are_refused_as_by_llm(tiny_model_path):
    with pytest.raises(TypeError, match="max_tokens"):
        AsyncLLM(str(tiny_model_path), max_tokens=3)


def test_the_interpreter_ends_while_requests_run(tiny_model_path):
    code = f"""if True:
        import asyncio
        from jaxinfer import AsyncLLM, SamplingParams
        llm = AsyncLLM({str(tiny_model_path)!r}, **{SETTINGS!r})
        async def main():
            reader = llm.generate("hello", SamplingParams(max_tokens=100, ignore_eos=True))
            await anext(reader)
            print("running", flush=True)
            globals()["kept"] = reader
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "running\n"), done.stderr
