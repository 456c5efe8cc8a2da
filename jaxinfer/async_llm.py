"""The asyncio door: `AsyncLLM`. One thread drives the engine, which is not thread-safe; event loops talk to it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from jaxinfer.config import EngineConfig
from jaxinfer.engine.errors import EngineDeadError, EngineError
from jaxinfer.engine.memory import MemoryPlan
from jaxinfer.engine.process import check_process
from jaxinfer.llm import LLM
from jaxinfer.mailbox import Mailbox, OutputKind, check_output_kind, copied
from jaxinfer.metrics import EngineMetrics
from jaxinfer.prompts import Prompt, Request, prompt_salt
from jaxinfer.request import RequestOptions, RequestOutput, SamplingParams
from jaxinfer.structured.grammar import Grammar
from jaxinfer.tokenizer import Tokenizer

_CLOSED = "this AsyncLLM is closed; make a new one"


class AsyncLLM:
    """An `LLM` for asyncio programs: many requests at once, each read as it is made. Takes `LLM`'s arguments.

    Requests may come from several event loops. Cancelling the task that reads, or closing the generator, aborts the
    request; what it held is free before the next step. Closed, every method raises `RuntimeError`.
    """

    def __init__(self, model: Any = None, **settings: Any):
        self._llm = LLM(model, **settings)
        self._config, self._memory_plan = self._llm.engine.config, self._llm.memory_plan
        self._driver = _Driver(self._llm)
        # One thread, so that requests reach the engine in the order in which they were made.
        self._encoder = ThreadPoolExecutor(1, "jaxinfer-encode")
        # Without close(): when the object is dropped, and at exit before jax takes its devices down.
        weakref.finalize(self, self._driver.stop).atexit = False

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Positions of prompt and output together."""
        return self._config.scheduler.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._config.scheduler.max_num_seqs

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows."""
        return self._config.model.vocab_size

    @property
    def embed_dim(self) -> int:
        """D, the length of a token's hidden state."""
        return self._config.model.embed_dim

    @property
    def memory_plan(self) -> MemoryPlan:
        """As `LLM.memory_plan`."""
        return self._memory_plan

    @property
    def default_sampling_fields(self) -> dict[str, Any]:
        """What the model's `generation_config.json` recommends, by the names of `SamplingParams`."""
        return dict(self._llm.default_sampling_fields)

    @property
    def source(self) -> str:
        """Where the model comes from, in words."""
        return self._llm.source

    @property
    def failure(self) -> str | None:
        """Why no request can run any more; None where they can."""
        return self._driver.failure

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request as it stands, all of it each time, until it has finished.

        Each output is a copy of its own. Who reads slowly skips some, never the last. After `abort` the last one's
        unfinished choices have the finish_reason "abort"; there is none where the request had not begun. With
        `output_kind` "delta", an output's choices hold the text, tokens and log-probabilities since the last output,
        and none is skipped; with "final" there is one output, at the end.

        Args:
            prompt: a text, `{"prompt": …}` or `{"prompt_token_ids": […]}`, with a `cache_salt` beside it or not.
            request_id: for `abort`; made up when None.
            priority, tenant, timeout_s: as in `RequestOptions`.

        Raises:
            ValueError: a bad prompt or parameter, or a request_id in use.
            EngineError: a step failed. `EngineDeadError`, a kind of it, where later requests will fail too.
        """
        check_output_kind(output_kind)
        options = RequestOptions(priority, tenant, prompt_salt(prompt), timeout_s)
        return self._read(partial(self._llm._encode, prompt), sampling_params, request_id, options, output_kind)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate`, given back once the engine has accepted the request: what is wrong with it is raised here."""
        check_output_kind(output_kind)
        options = RequestOptions(priority, tenant, prompt_salt(prompt), timeout_s)
        encode = partial(self._llm._encode, prompt)
        outputs = self._read(encode, sampling_params, request_id, options, output_kind, announce=True)
        await anext(outputs)
        return outputs

    async def encode(self, encode: Callable[[], list[int]]) -> list[int]:
        """Run a function of the tokenizer where prompts are encoded, without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        timeout_s: float | int | None = None,
        **template_variables: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation, a list of `{"role", "content"}`; outputs and errors are `generate`'s."""
        options = RequestOptions(priority, tenant, cache_salt, timeout_s)
        encode = partial(self._encode_chat, messages, template_variables)
        return self._read(encode, sampling_params, request_id, options, "cumulative")

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | int | None = None,
    ) -> AsyncGenerator[str, None]:
        """The text of one completion as it is made, more at once for who reads slowly; errors are `generate`'s."""
        if sampling_params is not None and sampling_params.num_choices != 1:
            raise ValueError(f"n={sampling_params.n}, best_of={sampling_params.best_of}: a stream has one choice")
        options = RequestOptions(priority, tenant, prompt_salt(prompt), timeout_s)
        return self._read(partial(self._llm._encode, prompt), sampling_params, request_id, options, "text")

    async def abort(self, request_id: str) -> None:
        """End a request; returns when what it held is free. One that is not running is no error."""
        await asyncio.wrap_future(self._driver.call(partial(self._driver.abort, request_id)))

    def stats(self) -> dict[str, float | int]:
        """Counts of the engine, as in `LLM.stats`."""
        self._driver.check()
        return self._llm.stats()

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, with what was left to be chosen."""
        return self._config

    @property
    def metrics(self) -> EngineMetrics:
        """What requests took since the start; to be read from any thread."""
        return self._llm.engine.metrics

    async def wait_until_compiled(self, timeout_s: float | int | None = None) -> None:
        """As `LLM.wait_until_compiled`, without holding up the event loop."""
        self._driver.check()
        await asyncio.to_thread(self._llm.wait_until_compiled, timeout_s)

    def close(self) -> None:
        """End every request with `RuntimeError`, wait for the step that runs, and give the memory back."""
        self._driver.stop()
        self._driver.join()
        self._encoder.shutdown(wait=False)

    async def aclose(self) -> None:
        """`close`, without holding up the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str | None, list[int]]:
        return None, self.tokenizer.apply_chat_template(messages, **variables)

    async def _read(
        self,
        encode: Callable[[], tuple[str | None, list[int]]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        kind: OutputKind | Literal["text"],
        announce: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """What the engine leaves in the request's mailbox, after a None at its acceptance if `announce`."""
        driver, loop = self._driver, asyncio.get_running_loop()
        driver.check()
        (params,) = self._llm._params_of(sampling_params, 1)
        mailbox = Mailbox(loop, f"request-{uuid.uuid4().hex}" if request_id is None else request_id, kind)
        driver.post(partial(driver.expect, mailbox))
        try:
            try:
                text, ids, grammar = await loop.run_in_executor(self._encoder, _prepare, self._llm, encode, params)
            except RuntimeError:
                driver.check()  # the encoder refuses work once it is shut down
                raise
            driver.post(partial(driver.add, mailbox, (text, ids, params, options), grammar))
            if announce:
                await mailbox.taken()
                yield None
            while (item := await mailbox.get()) is not None:
                yield item
        finally:
            driver.drop(mailbox)


def _prepare(
    llm: LLM, encode: Callable[[], tuple[str | None, list[int]]], params: SamplingParams
) -> tuple[str | None, list[int], Grammar | None]:
    """What a request needs of its prompt and form, made outside the engine's thread."""
    text, ids = encode()
    return text, ids, llm.engine.grammars.of(params)


class _Driver:
    """The engine's thread. It holds no `AsyncLLM`, so that a dropped one can be collected."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._expected: list[Mailbox] = []
        self.failure: str | None = None
        self._stopped = False
        self._lock = threading.RLock()  # a finalizer may call stop() in the middle of post()
        self._thread = threading.Thread(target=self._loop, name="jaxinfer-engine", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def check(self) -> None:
        """Raise `RuntimeError` once closed, `EngineDeadError` in a forked process, which has no engine thread."""
        check_process()
        if self._stopped:
            raise RuntimeError(_CLOSED)

    def post(self, command: Callable[[], object]) -> None:
        """Have the engine thread run `command` before its next step."""
        self.check()  # before the lock too, which a thread may have held when this process was forked from its own
        with self._lock:
            self.check()
            self._commands.put(command)

    def call(self, command: Callable[[], object]) -> Future[Any]:
        """Like `post`; the future is done when the command is."""
        future: Future[Any] = Future()

        def run() -> None:
            awaited = future.set_running_or_notify_cancel()
            try:
                result = command()
            except Exception as error:
                if awaited:
                    future.set_exception(error)
            else:
                if awaited:
                    future.set_result(result)

        self.post(run)
        return future

    def drop(self, mailbox: Mailbox) -> None:
        """A reader has left."""
        with self._lock:
            if not self._stopped and not mailbox.ended:
                self._commands.put(partial(self._forget, mailbox))

    def stop(self) -> None:
        """Ask the thread to end, after the step that runs."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._commands.put(None)
                atexit.unregister(self._at_exit)

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _at_exit(self) -> None:
        self.stop()
        self._thread.join(timeout=10.0)  # a thread inside XLA while the interpreter goes down can crash the process

    # In the engine thread.

    def _loop(self) -> None:
        try:
            while self._run_commands():
                if self._mailboxes:
                    self._step()
        finally:
            self.stop()
            self._end_all(lambda: RuntimeError(_CLOSED))
            self._llm.close()
            while not self._commands.empty():  # only where a command failed: what came after it must not wait forever
                if (command := self._commands.get()) is not None:
                    command()

    def _run_commands(self) -> bool:
        """What has been asked for; sleeps where nothing runs and nothing has. False at the end."""
        while not (self._commands.empty() and self._mailboxes):
            command = self._commands.get()
            if command is None:
                return False
            command()
            del command  # or it would hold its request while this thread sleeps
        return True

    def expect(self, mailbox: Mailbox) -> None:
        """A request whose prompt is being encoded, so that `abort` knows it."""
        self._expected.append(mailbox)

    def add(self, mailbox: Mailbox, request: Request, grammar: Grammar | None) -> None:
        self._expected.remove(mailbox)
        if mailbox.ended:
            return
        try:
            if self.failure is not None:
                raise EngineDeadError(self.failure)
            text, ids, params, options = request
            self._llm.engine.add(mailbox.request_id, ids, params, text, options=options, grammar=grammar)
        except Exception as error:
            self._notify([mailbox] if mailbox.end(error) else [])
        else:
            self._mailboxes[mailbox.request_id] = mailbox
            self._notify([mailbox] if mailbox.take() else [])

    def abort(self, request_id: str) -> None:
        for expected in self._expected:
            if expected.request_id == request_id:
                expected.end()  # nobody waits on it before it is added
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:
            return
        self._forget(mailbox)
        if mailbox.last is None:
            woken = mailbox.end()
        else:
            last = copied(mailbox.last)
            last.finished = True
            for choice in last.outputs:
                choice.finish_reason = choice.finish_reason or "abort"
            woken = mailbox.put(last, [""] * len(last.outputs))
        self._notify([mailbox] if woken else [])

    def _forget(self, mailbox: Mailbox) -> None:
        if mailbox in self._expected:  # its prompt could not be encoded, or nobody waited for it
            self._expected.remove(mailbox)
        if self._mailboxes.get(mailbox.request_id) is mailbox:  # the id may be another's by now
            del self._mailboxes[mailbox.request_id]
            self._llm.engine.abort(mailbox.request_id)

    def _step(self) -> None:
        try:
            moved = self._llm.engine.step()
        except BaseException as error:
            if isinstance(error, EngineDeadError):
                self.failure = str(error)
            self._end_all(partial(_engine_error, error))
            return
        woken = []
        for output, deltas in moved:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                if mailbox.put(output, deltas):
                    woken.append(mailbox)
                if output.finished:
                    del self._mailboxes[output.request_id]
        self._notify(woken)

    def _end_all(self, make_error: Callable[[], BaseException]) -> None:
        mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
        try:
            for mailbox in mailboxes:
                self._llm.engine.abort(mailbox.request_id)
        finally:
            # Each reader gets an exception of its own: raising one in two tasks would mix up their tracebacks.
            self._notify([mailbox for mailbox in mailboxes if mailbox.end(make_error())])

    def _notify(self, mailboxes: list[Mailbox]) -> None:
        """Wake readers, with one call into each of their event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, group in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, group)
            except RuntimeError:  # the loop is closed, and its readers are gone with it
                for mailbox in group:
                    self._forget(mailbox)


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


def _engine_error(error: BaseException) -> EngineError:
    kind = EngineDeadError if isinstance(error, EngineDeadError) else EngineError
    failure = kind(f"the engine failed: {error!r}")
    failure.__cause__ = error
    return failure
