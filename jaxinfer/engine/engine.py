"""The loop: schedule, run, sample, commit. One step of it moves every running sequence on."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_manager import PageManager
from jaxinfer.config import EngineConfig
from jaxinfer.engine.assemble import assemble
from jaxinfer.engine.buckets import MIN_CHUNK_TOKENS
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.inputs import Row
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.live import LiveRequest
from jaxinfer.engine.load import ModelSource
from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.process import check_process
from jaxinfer.engine.programs import BackgroundCompiler
from jaxinfer.engine.prompt_outputs import PromptOutput
from jaxinfer.engine.reading import READ, Step, StepReader
from jaxinfer.engine.sampler import SamplingRow, warm_lane_update
from jaxinfer.metrics import EngineMetrics
from jaxinfer.request import (
    DEFAULT_OPTIONS,
    RequestOptions,
    RequestOutput,
    SamplingParams,
    SequenceState,
    plain_ids,
)
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.scheduler.scheduler import Schedule, ScheduledRow, Scheduler
from jaxinfer.structured.grammar import Grammar, GrammarCompiler
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.token_index import TokenIndex

logger = logging.getLogger("jaxinfer")


class Engine:
    """Owns the scheduler, the runner and every live request. Not thread-safe: one caller drives `step`."""

    def __init__(
        self,
        model: ModelSource,
        tokenizer: Tokenizer,
        config: EngineConfig,
        logits_processors: Sequence[LogitsProcessor] = (),
    ):
        assembled = assemble(model, config, logits_processors)
        self.config, self.memory_plan = assembled.config, assembled.plan
        self.runner, self.sampler = assembled.runner, assembled.sampler
        self.tokenizer = tokenizer
        limits, cache, windows = self.config.scheduler, self.config.cache, self.config.model.windows
        pages = PageManager(
            PageAllocator(self.memory_plan.num_pages),
            cache.page_size,
            share=cache.enable_prefix_caching,
            window=max(windows) if all(windows) else 0,
            max_chunk=limits.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(limits, pages)
        self.grammars = GrammarCompiler(tokenizer, self.config.model.vocab_size)
        self.metrics = EngineMetrics(limits.max_model_len)
        self._compiler = assembled.compiler
        self._background: BackgroundCompiler | None = None
        self._in_flight: Step | None = None
        self._suspects: list[SequenceState] = []  # of a step that failed; each runs alone next
        self._repeated = False
        self._live: dict[str, LiveRequest] = {}
        self._timed: list[LiveRequest] = []  # those with a time limit
        self._state_of: dict[SequenceState, OutputState] = {}
        self.reader = StepReader(self._live, self._state_of, tokenizer, self.runner)
        self._num_arrived = 0
        self._num_failed_steps = 0
        self._failure: str | None = None  # no exception: its traceback would keep arrays alive

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"Engine({self.config.model.architecture}, {stats['num_running']} running, {stats['queue_len']} queued, "
            f"{stats['pages_used']}/{stats['pages_total']} pages{', dead' if self._failure else ''})"
        )

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile what serves any step, the catch-all bucket and its sampling; the rest follows in the background.

        `progress(done, total)` follows the first part. Steps run in the smallest bucket that is compiled by then.
        """
        programs, sampling = self.runner.programs, self.sampler.programs
        catch_all, *others = self.runner.buckets
        # Small ones first: a few tokens in the catch-all's shape waste most. A prompt comes before its decodes.
        others.sort(
            key=lambda bucket: (bucket.num_tokens > MIN_CHUNK_TOKENS, bucket.tile_queries == 1, bucket.num_tokens)
        )
        jobs: list[Callable[[], object]] = []
        for bucket in [catch_all, *others]:
            # Sampling first: a bucket that is compiled may be chosen.
            jobs += [partial(sampling.__getitem__, bucket.num_rows), partial(programs.step, bucket)]
        first, later = jobs[:2], [*jobs[2:], programs.copy, programs.score]
        later.append(partial(warm_lane_update, self.sampler.num_lanes, self.sampler.vocab_size))
        for done, job in enumerate(first):
            progress(done, len(first))
            job()
        progress(len(first), len(first))
        if self._compiler.num_compiles == 0:
            # Stored programs load in less time than a small step takes in a large shape.
            for job in later[:2]:
                job()
        self._background = BackgroundCompiler(later)
        weakref.finalize(self, self._background.stop).atexit = False

    def wait_until_compiled(self, timeout_s: float | int | None = None) -> None:
        """Return when the programs are compiled that `warm_up` left for the background; see `LLM`."""
        if self._background is not None:
            self._background.wait(timeout_s)

    @cached_property
    def _token_index(self) -> TokenIndex:
        return TokenIndex(self.tokenizer)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        first_scored: int = 1,
        options: RequestOptions = DEFAULT_OPTIONS,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request. `first_scored` is the first prompt position that `prompt_logprobs` covers.

        `grammar` is what `grammars` made of the params, in any thread; compiled here when None.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, a request id in use, a logits
                processor that was not registered, a form that cannot be had or leaves no first token.
            EngineDeadError: in a fork of the engine's process.
        """
        check_process()
        limit, vocab = self.config.scheduler.max_model_len, self.config.model.vocab_size
        if request_id in self._live:
            raise ValueError(f"request_id={request_id!r} is already running")
        prompt_ids = plain_ids("prompt_token_ids", prompt_ids, vocab)
        if not prompt_ids:
            raise ValueError("prompt is empty: give at least one token")
        if len(prompt_ids) > limit:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens; max_model_len={limit} is the most it may have")
        if len(prompt_ids) == limit and params.max_tokens != 0:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens; max_model_len={limit} leaves no room for output")
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            plain_ids(name, list(getattr(params, name) or ()), vocab)
        self.sampler.check(params)
        grammar = grammar or self.grammars.of(params)
        total = limit if params.max_tokens is None else min(limit, len(prompt_ids) + params.max_tokens)
        reads_prompt = params.prompt_logprobs is not None or params.return_hidden_states
        sequences = [
            SequenceState(
                request_id,
                index,
                list(prompt_ids),
                params,
                total,
                arrival=self._num_arrived,
                options=options,
                reads_prompt=reads_prompt and index == 0,
            )
            for index in range(params.num_choices)
        ]
        states = [OutputState(each, self.tokenizer, vocab, lambda: self._token_index, grammar) for each in sequences]
        states[0].check_first()
        # Which of best_of choices are shown is known at the end.
        shown = [state.output for state in states] if params.num_choices == params.n else []
        output = RequestOutput(request_id, prompt, list(prompt_ids), shown, False)
        of_prompt = PromptOutput(output, params, self.tokenizer, first_scored) if reads_prompt else None
        key = self.sampler.key_of(params.seed, self._num_arrived)
        deltas = [""] * params.num_choices
        live = LiveRequest(output, params, options, states, of_prompt, key, time.monotonic(), deltas, self.metrics)
        for sequence in sequences:  # all or none: the first is refused if any is
            self.scheduler.add(sequence)
        self._state_of.update(zip(sequences, states, strict=True))
        self._live[request_id] = live
        if options.timeout_s is not None:
            self._timed.append(live)
        self._num_arrived += 1

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; one that is not running is no error."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.left()
            for state in live.states:
                self._leave(state.sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[tuple[RequestOutput, list[str]]]:
        """One step. Returns the requests that moved on, each with the new text of its choices.

        With `overlap`, the step that is dispatched is one ahead of the step whose tokens are read, so the first call
        returns nothing. A request with best_of > n appears once, when it has finished and its choices are known.

        A step that fails is taken back and its requests run one by one, which costs time and changes no token: the one
        with which it fails again ends with finish_reason "error", the others go on. Out of memory, fewer run together
        afterwards. An interrupt waits until the step is complete.

        Raises:
            EngineDeadError: an earlier step failed, and what it had lost could not be made anew; or in a fork of the
                engine's process.
        """
        check_process()
        if self._failure is not None:
            raise EngineDeadError(f"{self._failure}; make a new LLM")
        with DeferredInterrupts():
            try:
                return self._step()
            except BaseException:
                self._reset()
                raise

    def _reset(self) -> None:
        self._num_failed_steps += 1
        try:
            for request_id in list(self._live):
                self.abort(request_id)
            self._take_back()
            self.scheduler.check_integrity()
        except BaseException as error:
            self._failure = f"a step failed and the engine could not be reset ({error!r})"

    def _take_back(self) -> None:
        """After a failed step: nothing is in flight, nothing is in the cache, and every request waits."""
        self._in_flight = None
        self._suspects = []
        for sequence in self._state_of:
            sequence.num_pending = 0
        while self.scheduler.preempt_last():
            pass
        self.scheduler.pages.forget()
        self.runner.restore_cache()
        self.sampler.restore_state()

    def close(self) -> None:
        """Drop what lives on the device, even while a traceback still holds the engine."""
        self._failure = "this engine is closed"
        self._in_flight = None
        if self._background is not None:
            self._background.stop()
        self.runner.close()
        self.sampler.close()

    def _step(self) -> list[tuple[RequestOutput, list[str]]]:
        moved = self._expire()
        alone = self._suspects[0] if self._suspects else None
        try:
            sequences = self._advance(alone)
        except Exception as error:
            moved += self._recover(error, alone)
        else:
            moved += self._settle(sequences)
            self._repeated = self._repeated and alone is not None
            self._suspects = [each for each in self._suspects if each is not alone or alone not in sequences]
        return self._report(moved)

    def _advance(self, alone: SequenceState | None) -> list[SequenceState]:
        """Dispatch a step and read one; returns the sequences that have a new token, or have ended."""
        plan = self.scheduler.schedule() if alone is None else self.scheduler.schedule_alone(alone)
        before, self._in_flight = self._in_flight, None
        if not plan.rows and not plan.copies and before is None and self._state_of:
            raise RuntimeError("no request can run, and none is running; this is an error in the scheduler")
        self._in_flight = self._dispatch(plan)
        sequences = self.reader.read(before) if before is not None else []
        if self._in_flight is not None and (alone is not None or not self.config.overlap):
            last, self._in_flight = self._in_flight, None
            sequences += self.reader.read(last)
        return sequences

    def _dispatch(self, plan: Schedule) -> Step | None:
        """Start a step on the device. From here on the host may go on with the next."""
        for sequence in plan.admitted:
            self._live[sequence.request_id].admitted()
            if sequence.lane >= 0:
                self.sampler.enter(sequence)
        self.runner.copy([(source, target) for target, source in plan.copies.items()])
        if not plan.rows:
            return None
        hidden, logits = self.runner.run([_row(row) for row in plan.rows], self.sampler.state.last_token)
        self.metrics.step(sum(row.num_tokens for row in plan.rows))
        drawing: dict[int, SequenceState] = {index: row.sequence for index, row in enumerate(plan.rows) if row.draws}
        sampled = None
        if drawing:
            sampling = [self._sampling_row(drawing[i]) if i in drawing else None for i in range(len(plan.rows))]
            sampled = self.sampler.run(logits, sampling)
            for name in READ:
                getattr(sampled, name).copy_to_host_async()
        return Step(plan.rows, hidden, logits, sampled)

    def _sampling_row(self, sequence: SequenceState) -> SamplingRow:
        return sequence, self._live[sequence.request_id].key, self._state_of[sequence].mask()

    def _settle(self, sequences: list[SequenceState]) -> list[LiveRequest]:
        """Let go of the sequences that ended; returns their requests."""
        moved, now_s = [], time.monotonic()
        for sequence in sequences:
            live, state = self._live[sequence.request_id], self._state_of[sequence]
            moved.append(live)
            live.moved(sequence.index, now_s)
            if sequence.params.max_tokens == 0 and not state.output.finish_reason:
                state.end("length")
            if state.output.finish_reason:
                self._leave(sequence)
            else:
                self.scheduler.read(sequence)
        return moved

    def _leave(self, sequence: SequenceState) -> None:
        self.scheduler.finish(sequence)
        self._state_of.pop(sequence, None)  # a choice that ended has left already
        self._suspects = [each for each in self._suspects if each is not sequence]

    def _expire(self) -> list[LiveRequest]:
        """End the requests whose time is up."""
        now = time.monotonic()
        self._timed = [each for each in self._timed if self._live.get(each.output.request_id) is each]
        late = [each for each in self._timed if each.deadline_s <= now]
        for live in late:
            self._end(live, "timeout")
        return late

    def _end(self, live: LiveRequest, finish_reason: str, stop_reason: str | None = None) -> None:
        live.end(finish_reason, stop_reason)
        for state in live.states:
            self._leave(state.sequence)

    def _recover(self, error: Exception, alone: SequenceState | None) -> list[LiveRequest]:
        """Go on after a step that failed. The cause, where it is one request, shows when each runs alone."""
        self._num_failed_steps += 1
        num_rows, suspects = len(self.scheduler.running), self._suspects or self.scheduler.running.copy()
        self._take_back()
        ended = []
        if alone is None:
            logger.warning("a step failed and is repeated, one request at a time: %r", error)
        else:
            logger.error("request %s failed", alone.request_id, exc_info=error)
            live = self._live[alone.request_id]
            self._end(live, "error", f"the step failed: {error!r}")
            ended.append(live)
        if alone is None and (self._repeated or "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError)):
            self.scheduler.limit_rows(num_rows // 2)
        self._repeated = alone is None
        self._suspects = sorted((each for each in suspects if each in self._state_of), key=lambda each: each.rank)
        return ended

    def _report(self, moved: list[LiveRequest]) -> list[tuple[RequestOutput, list[str]]]:
        """The requests that moved on, each once; those that have finished leave."""
        reports = [live.report() for live in {live.output.request_id: live for live in moved}.values()]
        for output, _ in reports:
            if output.finished:
                self._live.pop(output.request_id).left()
        return [(output, deltas) for output, deltas in reports if output.outputs]

    def update_params(self, params: Any) -> None:
        """See `ModelRunner.update_params`; keys and values of the old parameters are forgotten.

        Raises:
            RuntimeError: requests are running.
        """
        check_process()
        if self.has_work:
            raise RuntimeError("update_params: requests are running, and would go on with keys of the old parameters")
        self.runner.update_params(params)
        self.scheduler.pages.forget()

    def stats(self) -> dict[str, float | int]:
        """Counts as they stand; pages exclude the null page, and those used are held by requests.

        `prefix_cache_hit_rate` is of tokens: those found in the cache over those looked up, prompts and resumed ones.
        `padding_waste` is padded tokens over all that steps ran.
        """
        pages, num_padded = self.scheduler.pages, self.runner.num_padded_tokens
        total = pages.allocator.num_pages - 1
        return {
            "num_running": len(self.scheduler.running),
            "queue_len": len(self.scheduler.waiting),
            "pages_used": total - pages.num_available,
            "pages_cached": pages.tree.num_evictable,
            "pages_total": total,
            "num_compiles": self._compiler.num_compiles,
            "num_programs_loaded": self._compiler.num_loaded,
            "compile_time_s": self._compiler.compile_time_s,
            "padding_waste": num_padded / max(1, num_padded + self.runner.num_run_tokens),
            "num_padded_tokens": num_padded,
            "num_computed_tokens": self.metrics.num_computed_tokens,
            "num_looked_up_tokens": pages.num_looked_up_tokens,
            "num_cached_tokens": pages.num_cached_tokens,
            "prefix_cache_hit_rate": pages.num_cached_tokens / max(1, pages.num_looked_up_tokens),
            "num_preemptions": self.scheduler.num_preemptions,
            "num_failed_steps": self._num_failed_steps,
        }


def _row(row: ScheduledRow) -> Row:
    """What a row is to the runner; its last token may be one that only the device knows."""
    sequence, end = row.sequence, row.start + row.num_tokens
    tokens = sequence.tokens(row.start, min(end, sequence.num_known))
    return Row(tokens if end <= sequence.num_known else [*tokens, -1 - sequence.lane], end, sequence.pages)
