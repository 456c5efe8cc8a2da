"""The loop: schedule, run, sample, commit. One step of it moves every running sequence on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from jaxtyping import Array

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.paged_kv import page_bytes
from jaxinfer.config import EngineConfig
from jaxinfer.engine.buckets import MIN_CHUNK_TOKENS, plan_buckets
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.inputs import Row
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.memory import plan_pages
from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.program_store import open_store
from jaxinfer.engine.programs import BackgroundCompiler, Compiler
from jaxinfer.engine.prompt_outputs import PromptOutput, logprob_entry
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.sampler import Sampler, SamplingRow, warm_lane_update
from jaxinfer.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, SequenceState, plain_ids
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.scheduler.scheduler import ScheduledRow, Scheduler
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.token_index import TokenIndex


@dataclass
class _Live:
    """A request that has not finished."""

    output: RequestOutput
    params: SamplingParams
    states: list[OutputState]
    prompt: PromptOutput | None
    key: np.ndarray
    arrival_s: float
    deltas: list[str] = field(default_factory=list)


class Engine:
    """Owns the scheduler, the runner and every live request. Not thread-safe: one caller drives `step`."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        config: EngineConfig,
        logits_processors: Sequence[LogitsProcessor] = (),
    ):
        limits, cache, shape = config.scheduler, config.cache, config.model
        self.config = config
        self.tokenizer = tokenizer
        table_width = -(-limits.max_model_len // cache.page_size)
        one = page_bytes(shape.num_layers, shape.num_kv_heads, cache.page_size, shape.head_dim, config.kv_dtype)
        wanted = limits.max_num_seqs * table_width
        num_pages = cache.num_pages or plan_pages(
            one, wanted=wanted, needed=table_width, utilization=cache.gpu_memory_utilization
        )
        self._compiler = Compiler(open_store(config.compilation_cache))
        self._background: BackgroundCompiler | None = None
        self.runner = ModelRunner(
            model,
            plan_buckets(limits.max_num_batched_tokens, limits.max_num_seqs, single_row=not config.batch_invariant),
            num_pages=num_pages,
            page_size=cache.page_size,
            table_width=table_width,
            kv_dtype=config.kv_dtype,
            compiler=self._compiler,
        )
        sampler_settings = {"seed": config.seed, "processors": logits_processors, "compiler": self._compiler}
        self.sampler = Sampler(shape.vocab_size, limits.max_num_seqs, **sampler_settings)
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
        first, later = jobs[:2], [*jobs[2:], programs.score]
        later.append(partial(warm_lane_update, self.sampler.num_lanes, self.sampler.vocab_size))
        for done, job in enumerate(first):
            progress(done, len(first))
            job()
        progress(len(first), len(first))
        if (
            self._compiler.num_compiles == 0
        ):  # stored programs load in less time than a small step takes in a large shape
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
    ) -> None:
        """Queue a request. `first_scored` is the first prompt position that `prompt_logprobs` covers.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, a request id in use, a logits
                processor that was not registered.
        """
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
        total = limit if params.max_tokens is None else min(limit, len(prompt_ids) + params.max_tokens)
        choices = range(params.num_choices)
        sequences = [SequenceState(request_id, index, list(prompt_ids), params, total) for index in choices]
        states = [OutputState(each, self.tokenizer, vocab, lambda: self._token_index) for each in sequences]
        # Which of best_of choices are shown is known at the end.
        shown = [state.output for state in states] if params.num_choices == params.n else []
        output = RequestOutput(request_id, prompt, list(prompt_ids), shown, False)
        of_prompt = None
        if params.prompt_logprobs is not None or params.return_hidden_states:
            of_prompt = PromptOutput(output, params, self.tokenizer, first_scored)
        key = self.sampler.key_of(params.seed, self._num_arrived)
        deltas = [""] * params.num_choices
        live = _Live(output, params, states, of_prompt, key, time.monotonic(), deltas)
        for sequence in sequences:  # all or none: the first is refused if any is
            self.scheduler.add(sequence)
        self._state_of.update(zip(sequences, states, strict=True))
        self._live[request_id] = live
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

        A request with best_of > n appears once, when it has finished and its choices are known.

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
        if self._background is not None:
            self._background.stop()
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
        hidden, logits = self.runner.run([self._row(row.sequence, row.num_tokens) for row in rows])
        self._keep(rows, hidden, logits)
        self.scheduler.commit(rows)
        self._num_computed_tokens += sum(row.num_tokens for row in rows)
        ready = [(index, row.sequence) for index, row in enumerate(rows) if row.samples]
        drawing = [(index, sequence) for index, sequence in ready if sequence.params.max_tokens != 0]
        if drawing:
            sampling: list[SamplingRow | None] = [None] * len(rows)
            for index, sequence in drawing:
                sampling[index] = self._sampling_row(sequence)
            sampled = self.sampler.run(logits, sampling)
            arrays = {name: np.asarray(getattr(sampled, name)) for name in _READ}
            for index, sequence in drawing:
                self._take(index, sequence, arrays)
        reports = [self._report(live) for live in self._settle([sequence for _, sequence in ready])]
        return [(output, deltas) for output, deltas in reports if output.outputs]

    def _row(self, sequence: SequenceState, num_tokens: int) -> Row:
        start = sequence.num_computed
        return Row(sequence.tokens(start, start + num_tokens), start + num_tokens, sequence.pages)

    def _sampling_row(self, sequence: SequenceState) -> SamplingRow:
        return sequence, self._live[sequence.request_id].key, self._state_of[sequence].mask()

    def _keep(self, rows: Sequence[ScheduledRow], hidden: Array, logits: Array) -> None:
        """Read from the device what some rows want of it: states of the prompt, states and logits of a draw."""
        end = 0
        for index, row in enumerate(rows):
            sequence, start, end = row.sequence, end, end + row.num_tokens
            live, params = self._live[sequence.request_id], sequence.params
            if live.prompt is not None and sequence.index == 0 and sequence.num_computed < len(sequence.prompt_ids):
                live.prompt.take(sequence.num_computed, np.asarray(hidden)[start:end], self.runner)
            if row.samples and params.max_tokens != 0:
                self._state_of[sequence].keep(
                    np.asarray(hidden)[end - 1] if params.return_hidden_states else None,
                    np.asarray(logits)[index] if params.return_logits else None,
                )

    def _take(self, row: int, sequence: SequenceState, arrays: dict[str, np.ndarray]) -> None:
        live, state = self._live[sequence.request_id], self._state_of[sequence]
        if arrays["mask_empty"][row] or arrays["bad_logits"][row]:
            state.output.finish_reason = "error"
            empty = arrays["mask_empty"][row]
            state.output.stop_reason = "no token is allowed" if empty else "the model's logits are not finite"
            return
        token, logprob, rank = (arrays[name][row].item() for name in ("tokens", "logprob", "rank"))
        entry: dict[int, Logprob] | None = None
        if (wanted := sequence.params.logprobs) is not None:
            top_ids = arrays["top_ids"][row, :wanted]
            entry = logprob_entry(self.tokenizer, token, logprob, rank, top_ids, arrays["top_logprobs"][row])
        live.deltas[sequence.index] += state.add(token, logprob, entry)

    def _settle(self, sequences: list[SequenceState]) -> list[_Live]:
        """Let go of the sequences that ended; returns the requests that moved on, each once."""
        moved: dict[str, _Live] = {}
        for sequence in sequences:
            live, state = self._live[sequence.request_id], self._state_of[sequence]
            moved[sequence.request_id] = live
            live.output.metrics.setdefault("ttft_s", time.monotonic() - live.arrival_s)
            if sequence.params.max_tokens == 0:
                state.output.finish_reason = "length"
            if state.output.finish_reason:
                self.scheduler.finish(sequence)
                del self._state_of[sequence]
        return list(moved.values())

    def _report(self, live: _Live) -> tuple[RequestOutput, list[str]]:
        deltas, live.deltas = live.deltas, [""] * len(live.deltas)
        if all(state.output.finish_reason for state in live.states):
            if live.params.num_choices > live.params.n:
                live.output.outputs = _best([state.output for state in live.states], live.params.n)
                deltas = [choice.text for choice in live.output.outputs]
            live.output.finished = True
            live.output.metrics["e2e_s"] = time.monotonic() - live.arrival_s
            del self._live[live.output.request_id]
        return live.output, deltas

    def stats(self) -> dict[str, int | float]:
        """Counts as they stand; pages exclude the null page. `padding_waste` is padded tokens over all of them."""
        num_padded = self.runner.num_padded_tokens
        return {
            "num_running": len(self.scheduler.running),
            "queue_len": len(self.scheduler.waiting),
            "pages_used": self.scheduler.allocator.num_used,
            "pages_total": self.scheduler.allocator.num_pages - 1,
            "num_compiles": self._compiler.num_compiles,
            "num_programs_loaded": self._compiler.num_loaded,
            "compile_time_s": self._compiler.compile_time_s,
            "padding_waste": num_padded / max(1, num_padded + self.runner.num_run_tokens),
            "num_computed_tokens": self._num_computed_tokens,
        }


def _best(choices: list[CompletionOutput], num: int) -> list[CompletionOutput]:
    """The choices with the highest mean log-probability a token, numbered anew; failed ones come last."""

    def rank(choice: CompletionOutput) -> tuple[bool, float]:
        return choice.finish_reason == "error", -choice.cumulative_logprob / max(1, len(choice.token_ids))

    return [replace(choice, index=index) for index, choice in enumerate(sorted(choices, key=rank)[:num])]


_READ = ("tokens", "logprob", "rank", "top_ids", "top_logprobs", "mask_empty", "bad_logits")
