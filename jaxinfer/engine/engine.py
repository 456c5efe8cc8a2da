"""The loop: schedule, run, sample, commit. One step of it moves every running sequence on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.paged_kv import page_bytes
from jaxinfer.config import EngineConfig
from jaxinfer.engine.buckets import plan_buckets
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.inputs import Row
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.sampler import Sampler
from jaxinfer.request import Logprob, RequestOutput, SamplingParams, SequenceState
from jaxinfer.sampling.inputs import MAX_LOGIT_BIAS
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer

CPU_POOL_BYTES = 4 * 10**9


@dataclass
class _Live:
    """A request that has not finished."""

    output: RequestOutput
    states: list[OutputState]
    key: np.ndarray
    arrival_s: float
    deltas: list[str] = field(default_factory=list)


class Engine:
    """Owns the scheduler, the runner and every live request. Not thread-safe: one caller drives `step`."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, config: EngineConfig):
        limits, cache, shape = config.scheduler, config.cache, config.model
        self.config = config
        self.tokenizer = tokenizer
        kv_dtype = config.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
        table_width = -(-limits.max_model_len // cache.page_size)
        one = page_bytes(shape.num_layers, shape.num_kv_heads, cache.page_size, shape.head_dim, kv_dtype)
        wanted = limits.max_num_seqs * table_width
        num_pages = cache.num_pages or 1 + max(table_width, min(wanted, CPU_POOL_BYTES // one))
        self.runner = ModelRunner(
            model,
            plan_buckets(limits.max_num_batched_tokens, limits.max_num_seqs),
            num_pages=num_pages,
            page_size=cache.page_size,
            table_width=table_width,
            kv_dtype=kv_dtype,
        )
        self.sampler = Sampler(
            shape.vocab_size, limits.max_num_seqs, max_logprobs=config.max_logprobs, seed=config.seed
        )
        self.scheduler = Scheduler(limits, PageAllocator(num_pages), cache.page_size)
        self._live: dict[str, _Live] = {}
        self._state_of: dict[SequenceState, OutputState] = {}
        self._num_arrived = 0
        self._num_computed_tokens = 0
        self._failure: str | None = None  # no exception: its traceback would keep arrays alive

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"Engine({self.config.model.architecture}, {stats['num_running']} running, {stats['queue_len']} queued, "
            f"{stats['pages_used']}/{stats['pages_total']} pages{', dead' if self._failure else ''})"
        )

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every program that serving needs, the catch-all first; `progress(done, total)` follows it."""
        buckets = self.runner.buckets
        row_counts = sorted({bucket.num_rows for bucket in buckets}, reverse=True)
        jobs: list[tuple[Callable, object]] = [(self.runner.program, bucket) for bucket in buckets]
        jobs[1:1] = [(self.sampler.compile, count) for count in row_counts]
        for done, (job, argument) in enumerate(jobs):
            progress(done, len(jobs))
            job(argument)
        self.sampler.warm_lane_update()
        progress(len(jobs), len(jobs))

    def add(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, a request id in use.
        """
        limit, vocab = self.config.scheduler.max_model_len, self.config.model.vocab_size
        if request_id in self._live:
            raise ValueError(f"request_id={request_id!r} is already running")
        if not prompt_ids:
            raise ValueError("prompt is empty: give at least one token")
        if len(prompt_ids) >= limit:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens; max_model_len={limit} leaves no room for output")
        _check_ids("prompt_token_ids", prompt_ids, vocab)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
        _check_ids("stop_token_ids", params.stop_token_ids or (), vocab)
        _check_ids("logit_bias", params.logit_bias or (), vocab)
        if len(params.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has more than {MAX_LOGIT_BIAS} entries")
        total = limit if params.max_tokens is None else min(limit, len(prompt_ids) + params.max_tokens)
        sequences = [SequenceState(request_id, index, list(prompt_ids), params, total) for index in range(params.n)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        states = [OutputState(sequence, self.tokenizer) for sequence in sequences]
        self._state_of.update(zip(sequences, states, strict=True))
        output = RequestOutput(request_id, prompt, list(prompt_ids), [state.output for state in states], False)
        key = self.sampler.key_of(params.seed, self._num_arrived)
        self._live[request_id] = _Live(output, states, key, time.monotonic(), [""] * params.n)
        self._num_arrived += 1

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; one that is not running is no error."""
        live = self._live.pop(request_id, None)
        for state in live.states if live else ():
            self.scheduler.finish(state.sequence)
            self._state_of.pop(state.sequence, None)  # a choice that ended has left already

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[tuple[RequestOutput, list[str]]]:
        """One step. Returns the requests that moved on, each with the new text of its choices.

        An interrupt waits until the step is complete. Any other exception drops every request, since a step runs them
        together, and leaves an engine without requests that can be used on.

        Raises:
            EngineDeadError: an earlier step failed, and what it had lost could not be made anew.
        """
        if self._failure is not None:
            raise EngineDeadError(f"{self._failure}; make a new LLM")
        with DeferredInterrupts():
            try:
                return self._step()
            except BaseException:
                self._reset()
                raise

    def _reset(self) -> None:
        try:
            for request_id in list(self._live):
                self.abort(request_id)
            self.scheduler.check_integrity()
            self.runner.restore_cache()
            self.sampler.restore_state()
        except BaseException as error:
            self._failure = f"a step failed and the engine could not be reset ({error!r})"

    def close(self) -> None:
        """Drop what lives on the device, even while a traceback still holds the engine."""
        self._failure = "this engine is closed"
        self.runner.close()
        self.sampler.close()

    def _step(self) -> list[tuple[RequestOutput, list[str]]]:
        before = set(self.scheduler.running)
        rows = self.scheduler.schedule()
        if not rows:
            return []
        for sequence in self.scheduler.running:
            if sequence not in before:
                self.sampler.enter(sequence)
        _, logits = self.runner.run([self._row(row.sequence, row.num_tokens) for row in rows])
        self.scheduler.commit(rows)
        self._num_computed_tokens += sum(row.num_tokens for row in rows)
        sampling = [self._sampling_row(row.sequence) if row.samples else None for row in rows]
        if not any(sampling):
            return []
        sampled = self.sampler.run(logits, sampling)
        return self._take(
            [(index, row.sequence) for index, row in enumerate(rows) if row.samples],
            {name: np.asarray(getattr(sampled, name)) for name in _READ},
        )

    def _row(self, sequence: SequenceState, num_tokens: int) -> Row:
        start = sequence.num_computed
        return Row(sequence.tokens(start, start + num_tokens), start + num_tokens, sequence.pages)

    def _sampling_row(self, sequence: SequenceState) -> tuple[SequenceState, np.ndarray, frozenset[int]]:
        return sequence, self._live[sequence.request_id].key, self._state_of[sequence].banned_ids

    def _take(self, sampled: list[tuple[int, SequenceState]], arrays: dict[str, np.ndarray]):
        moved: dict[str, _Live] = {}
        for row, sequence in sampled:
            live, state = self._live[sequence.request_id], self._state_of[sequence]
            moved[sequence.request_id] = live
            if arrays["mask_empty"][row] or arrays["bad_logits"][row]:
                state.output.finish_reason = "error"
                empty = arrays["mask_empty"][row]
                state.output.stop_reason = "no token is allowed" if empty else "the model's logits are not finite"
            else:
                token = int(arrays["tokens"][row])
                live.deltas[sequence.index] += state.add(token, self._logprobs(sequence, row, arrays))
            live.output.metrics.setdefault("ttft_s", time.monotonic() - live.arrival_s)
            if state.output.finish_reason:
                self.scheduler.finish(sequence)
                del self._state_of[sequence]
        return [self._report(live) for live in moved.values()]

    def _report(self, live: _Live) -> tuple[RequestOutput, list[str]]:
        deltas, live.deltas = live.deltas, [""] * len(live.deltas)
        if all(state.output.finish_reason for state in live.states):
            live.output.finished = True
            live.output.metrics["e2e_s"] = time.monotonic() - live.arrival_s
            del self._live[live.output.request_id]
        return live.output, deltas

    def _logprobs(self, sequence: SequenceState, row: int, arrays: dict[str, np.ndarray]) -> dict[int, Logprob] | None:
        wanted = sequence.params.logprobs
        if wanted is None:
            return None
        text = self.tokenizer.token_text
        token = int(arrays["tokens"][row])
        found = {token: Logprob(float(arrays["logprob"][row]), int(arrays["rank"][row]), text(token))}
        for rank in range(wanted):
            other = int(arrays["top_ids"][row, rank])
            found.setdefault(other, Logprob(float(arrays["top_logprobs"][row, rank]), rank + 1, text(other)))
        return found

    def stats(self) -> dict[str, int]:
        """Counts as they stand; pages exclude the null page."""
        return {
            "num_running": len(self.scheduler.running),
            "queue_len": len(self.scheduler.waiting),
            "pages_used": self.scheduler.allocator.num_used,
            "pages_total": self.scheduler.allocator.num_pages - 1,
            "num_compiles": self.runner.num_compiles + self.sampler.num_compiles,
            "num_computed_tokens": self._num_computed_tokens,
        }


_READ = ("tokens", "logprob", "rank", "top_ids", "top_logprobs", "mask_empty", "bad_logits")


def _check_ids(name: str, ids, vocab_size: int) -> None:
    bad = next((id for id in ids if not isinstance(id, int | np.integer) or not 0 <= id < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name}: token id {bad!r} is not a whole number below the vocabulary's {vocab_size}")
