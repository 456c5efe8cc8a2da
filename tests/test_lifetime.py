"""What an LLM holds, and when it lets go: after close, del, errors; and interrupts at any line, which lose nothing."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import weakref

import jax
import pytest

from jaxinfer import LLM, AsyncLLM, EngineDeadError, EngineError, RequestError, RequestOutput, SamplingParams
from jaxinfer.engine.interrupts import DeferredInterrupts

SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "page_size": 16,
    "dtype": "float32",
    "verbose": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, repetition_penalty=1.5)


@pytest.fixture
def make(tiny_model_path):
    def make():
        llm = LLM(str(tiny_model_path), **SETTINGS)
        llm.wait_until_compiled()
        return llm

    return make


@pytest.fixture(scope="module")
def llm(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        llm.wait_until_compiled()
        yield llm


def texts(llm, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(["hello", "a longer prompt", "x"], params)]


def check_idle(llm):
    stats = llm.stats()
    assert (stats["num_running"], stats["queue_len"], stats["pages_used"]) == (0, 0, 0)
    llm.engine.scheduler.check_integrity()
    assert llm._inboxes == {} and not llm.engine.has_work and llm.engine._state_of == {}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((llm.engine.runner.cache, llm.engine.sampler.state)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def base_bytes():
    """Bytes of arrays that live without the test's LLM."""
    return live_bytes()


def watch(llm):
    """Weak references to what must go: the engine, a parameter, the cache, the sampler's state."""
    engine = llm.engine
    arrays = [engine.runner._leaves[0], engine.runner.cache.k, engine.sampler.state.prompt_seen]
    return [weakref.ref(engine), *map(weakref.ref, arrays)]


# Memory


def test_close_gives_the_memory_back(make, base_bytes):
    llm = make()
    texts(llm)
    assert live_bytes() > base_bytes + 100_000
    watched = watch(llm)
    llm.close()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert live_bytes() == base_bytes
    for use in (lambda: texts(llm), llm.stats, lambda: next(llm.stream("x"))):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    llm.close()


def test_del_gives_the_memory_back(make, base_bytes):
    llm = make()
    texts(llm)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    watched = watch(llm)
    del stream, llm
    assert [ref() for ref in watched] == [None] * len(watched)
    assert live_bytes() == base_bytes


def test_making_one_again_and_again_does_not_grow(make, base_bytes):
    for _ in range(2):
        llm = make()  # replaces the one of the round before, as running a notebook cell again does
        texts(llm)
        one = live_bytes() - base_bytes
    del llm
    assert live_bytes() == base_bytes and one > 100_000


def test_an_error_in_the_body_gives_the_memory_back_although_its_traceback_lives(make, base_bytes, monkeypatch):
    def fail(*_):
        raise MemoryError("no more")

    with pytest.raises(MemoryError) as kept, make() as llm:
        watched = watch(llm)
        monkeypatch.setattr(llm.engine, "_report", fail)
        texts(llm)
    assert watched[0]() is not None, "the traceback no longer holds the engine; this test shows nothing"
    assert [ref() for ref in watched[1:]] == [None] * 3
    assert live_bytes() == base_bytes
    del kept


def test_an_interrupted_warm_up_gives_the_memory_back_although_its_traceback_lives(make, base_bytes, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.engine.runner.StepPrograms.step", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        make()
    assert live_bytes() == base_bytes
    del kept


def test_a_stream_left_open_does_not_survive_close(make, base_bytes):
    llm = make()
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    assert live_bytes() == base_bytes
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


# Interrupts


def test_an_interrupt_in_the_middle(llm):
    expected = texts(llm)
    llm.chat([{"role": "user", "content": "hello"}], GREEDY)  # imports what templates need: that is not ours to guard
    long = SamplingParams(max_tokens=60, n=8, ignore_eos=True)
    uses = [
        lambda: llm.generate(["hello"] * 20, long),
        lambda: llm.chat([{"role": "user", "content": "hello"}] * 3, long),
        lambda: [list(llm.stream("hello", SamplingParams(max_tokens=60, ignore_eos=True))) for _ in range(100)],
    ]
    before = signal.signal(signal.SIGALRM, lambda *_: _thread.interrupt_main())
    gc.disable()  # Python drops an interrupt that arrives inside jax's callback of a collection
    try:
        for use in uses:
            for delay_s in (0.001, 0.004, 0.0173):
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, delay_s)
                    use()
                check_idle(llm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert texts(llm) == expected


def run_lines(function, interrupt_at=None):
    """Run it, raising SIGINT at the given one of the lines of this package that it runs. Returns each line's file."""
    files = []

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if "jaxinfer/" not in file:
            return None
        if event == "line":
            files.append(file)
            if len(files) - 1 == interrupt_at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return files


@pytest.mark.slow
@pytest.mark.parametrize("door", ["generate", "stream", "left stream"])
def test_an_interrupt_at_any_line(llm, door):
    expected = texts(llm, PENALIZED)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, repetition_penalty=1.5)

    def leave_early():
        stream = llm.stream("hello", params)
        next(stream)
        stream.close()

    uses = {
        "generate": lambda: llm.generate("hello", params),
        "stream": lambda: list(llm.stream("hello", params)),
        "left stream": leave_early,
    }
    use = uses[door]
    files = run_lines(use)
    # All lines of the files that order these things, and a sample of the many others.
    lines = [at for at, file in enumerate(files) if file.endswith(("/llm.py", "/interrupts.py")) or at % 29 == 0]
    assert len(lines) > 50
    num_interrupted = 0
    for at in lines:
        try:
            run_lines(use, interrupt_at=at)
        except KeyboardInterrupt:
            num_interrupted += 1
        check_idle(llm)
    assert num_interrupted > 0.9 * len(lines)
    assert texts(llm, PENALIZED) == expected


@pytest.mark.slow
def test_an_interrupted_step_is_complete(llm):
    """Whoever drives the engine without an LLM goes on after an interrupt as if there had been none."""
    engine, outputs = llm.engine, []

    def first_step():
        outputs.extend(engine.step())

    def tokens(interrupt_at=None):
        engine.add("one", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        try:
            files = run_lines(first_step, interrupt_at)
        except KeyboardInterrupt:
            files = []
        while engine.has_work:
            outputs.extend(engine.step())
        return outputs[-1][0].outputs[0].token_ids, files

    tokens()  # fills caches, the tokenizer's for one, which takes lines that no later step runs
    expected, files = tokens()
    for at in range(0, len(files), 5):
        assert tokens(at) == (expected, [])
    check_idle(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_a_step_that_raises_leaves_nothing(llm, monkeypatch, error):
    expected, step = texts(llm), llm.engine.step

    def fail():
        step()
        raise error("in the step")

    for use in (lambda: texts(llm), lambda: list(llm.stream("hello", GREEDY))):
        monkeypatch.setattr(llm.engine, "step", fail)
        with pytest.raises(error, match="in the step"):
            use()
        monkeypatch.undo()
        check_idle(llm)
    assert texts(llm) == expected


def test_sections_nest_restore_and_leave_other_threads_alone():
    outer_done = False
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts() as outer:
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
        outer_done = True
        outer.check()
        raise AssertionError("check let it pass")
    assert outer_done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    called = []

    def in_thread():
        with DeferredInterrupts() as interrupts:
            called.append(signal.getsignal(signal.SIGINT))
            interrupts.check()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert called == [signal.default_int_handler]
    before = signal.signal(signal.SIGINT, lambda *_: called.append("mine"))
    try:
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            assert called[-1] != "mine"
        assert called[-1] == "mine"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with DeferredInterrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Errors in the middle of a step


def consume_and_fail(pytree):
    def fail(*_):
        for leaf in jax.tree.leaves(pytree()):
            leaf.delete()  # what a donating program does to its argument
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    return fail


def break_step(monkeypatch, llm, where, fails):
    """Let what a step calls lose what was donated to it and raise, where `fails(sequence or None)` says so."""
    engine = llm.engine

    def breaking(function, lose, sequence_of=lambda *_: None):
        def call(*arguments):
            if fails(sequence_of(*arguments)):
                lose()
            return function(*arguments)

        return call

    lose_cache = consume_and_fail(lambda: engine.runner.cache)
    lose_state = consume_and_fail(lambda: engine.sampler.state)
    if where == "runner":
        monkeypatch.setattr(engine.runner, "run", breaking(engine.runner.run, lose_cache))
    elif where == "sampler":
        monkeypatch.setattr(engine.sampler, "run", breaking(engine.sampler.run, lose_state))
    elif where == "lane":
        monkeypatch.setattr(engine.sampler, "enter", breaking(engine.sampler.enter, lose_state, lambda each: each))
    elif where == "mask":
        row = breaking(engine._sampling_row, lose_cache, lambda each: each)
        monkeypatch.setattr(engine, "_sampling_row", row)
    else:
        monkeypatch.setattr(engine.reader, "read", breaking(engine.reader.read, lose_cache))


@pytest.mark.parametrize("where", ["runner", "sampler", "lane", "mask", "read"])
def test_a_step_that_fails_once_is_repeated_and_changes_nothing(llm, monkeypatch, where):
    expected, whole = texts(llm, PENALIZED), "".join(llm.stream("hello", GREEDY))
    stream = llm.stream("hello", GREEDY)
    text = next(stream)
    calls = iter([False, True])
    break_step(monkeypatch, llm, where, lambda _: next(calls, False))
    assert texts(llm, PENALIZED) == expected
    assert next(calls, None) is None, "nothing failed"
    assert text + "".join(stream) == whole
    check_idle(llm)
    assert texts(llm, PENALIZED) == expected


@pytest.mark.parametrize("where", ["lane", "mask", "take"])
def test_the_request_with_which_a_step_fails_is_found_and_the_others_go_on(llm, monkeypatch, where):
    prompts = ["hello", "a longer prompt", "x", "another", "hello there"]
    before = llm.generate(prompts, PENALIZED)
    bad = llm.tokenizer.encode("x")
    if where == "take":
        take = llm.engine.reader._take

        def fail(row, sequence, arrays):
            if sequence.prompt_ids == bad:
                raise ValueError("no such text")
            take(row, sequence, arrays)

        monkeypatch.setattr(llm.engine.reader, "_take", fail)
    else:
        break_step(monkeypatch, llm, where, lambda sequence: sequence.prompt_ids == bad)
    after = llm.generate(prompts, PENALIZED)
    check_idle(llm)
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        if index == 2:
            reason = str(other.outputs[0].stop_reason)
            assert other.outputs[0].finish_reason == "error" and ("no such text" in reason or "RESOURCE" in reason)
        else:
            assert other.outputs == one.outputs
    assert llm.engine.scheduler.row_limit < SETTINGS["max_num_seqs"] or where == "take"


@pytest.mark.parametrize("where", ["runner", "sampler", "lane", "mask", "read"])
def test_where_every_step_fails_each_request_ends_with_the_error(llm, monkeypatch, where):
    expected = texts(llm, PENALIZED)
    stream = llm.stream("hello", PENALIZED)
    break_step(monkeypatch, llm, where, lambda _: True)
    outputs = llm.generate(["hello", "x"], PENALIZED)
    assert all("RESOURCE_EXHAUSTED" in output.outputs[0].stop_reason for output in outputs)
    with pytest.raises(RequestError, match="RESOURCE_EXHAUSTED"):
        next(stream)
    monkeypatch.undo()
    check_idle(llm)
    assert texts(llm, PENALIZED) == expected


def test_out_of_memory_fewer_run_together_until_it_fits(llm, monkeypatch):
    """A device that holds three rows, whatever the engine was planned for."""
    prompts, params = [f"prompt {index}" for index in range(8)], SamplingParams(max_tokens=30, ignore_eos=True, seed=3)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    llm.engine.scheduler.limit_rows(8)
    run, most = llm.engine.runner.run, []

    def limited(rows, last_token):
        if len(rows) > 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        most.append(len(rows))
        return run(rows, last_token)

    monkeypatch.setattr(llm.engine.runner, "run", limited)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert max(most) == 2 or max(most) == 3
    check_idle(llm)


def test_one_that_cannot_be_made_good_is_dead(make, monkeypatch):
    llm = make()
    lose_cache, fail = consume_and_fail(lambda: llm.engine.runner.cache), consume_and_fail(lambda: ())
    monkeypatch.setattr(llm.engine.runner, "run", lose_cache)
    monkeypatch.setattr(llm.engine.runner, "_make_cache", fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        texts(llm)
    monkeypatch.undo()
    for use in (lambda: texts(llm), lambda: list(llm.stream("hello", GREEDY)), llm.engine.step):
        with pytest.raises(EngineDeadError, match=r"RESOURCE_EXHAUSTED.*make a new LLM"):
            use()
    assert "dead" in repr(llm.engine)
    llm.close()


# Streams beside other calls


def test_a_stream_keeps_what_other_calls_make(llm):
    whole = llm.generate("hello", GREEDY)[0].outputs[0].text
    first, second = llm.stream("hello", GREEDY), llm.stream("hello", GREEDY)
    pieces = [next(first)]
    assert "".join(second) == whole
    texts(llm)
    assert "".join(pieces + list(first)) == whole
    aborted = llm.stream("hello", GREEDY)
    next(aborted)
    llm.engine.abort(next(iter(llm._inboxes)))
    with pytest.raises(EngineError, match="aborted"):
        list(aborted)
    check_idle(llm)


def test_reprs_are_short_and_tell_the_state(llm, make, tiny_model_path):
    assert repr(llm) == f"LLM({tiny_model_path}, float32, max_model_len=64)"
    assert repr(llm.engine) == "Engine(llama, 0 running, 0 queued, 0/32 pages)"
    output: RequestOutput = llm.generate("hello", GREEDY)[0]
    assert "5 prompt tokens" in repr(output) and "(8 tokens, length)" in repr(output) and len(repr(output)) < 120
    served = AsyncLLM(str(tiny_model_path), **SETTINGS)
    assert repr(served) == f"AsyncLLM({tiny_model_path}, float32, max_model_len=64)"
    served.close()
    assert repr(served) == f"AsyncLLM({tiny_model_path}, closed)"
