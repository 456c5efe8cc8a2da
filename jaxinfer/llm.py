"""The in-process doors: `LLM` and `generate`."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import jax

from jaxinfer.beam_search import BeamSearchOutput, BeamSearchParams, search
from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig, check_seed
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineError, RequestError
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.memory import MemoryPlan
from jaxinfer.engine.open import default_sampling_fields, open_model
from jaxinfer.engine.process import check_process
from jaxinfer.phases import log_phase, phase, process_age_s
from jaxinfer.progress import can_show, progress_bar
from jaxinfer.prompts import Prompt, Request, options_of, prompt_content, prompt_salt
from jaxinfer.request import RequestOptions, RequestOutput, SamplingParams
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.scoring import SCORE_PARAMS, join, score_of
from jaxinfer.tokenizer import Tokenizer

_Inbox = list[tuple[RequestOutput, list[str]]]


class LLM:
    """A language model in this process.

    Args:
        model: a GGUF file, a Hugging Face folder, a converted checkpoint, or a hub id. When None: the checkpoint
            under `checkpoints/` if there is one, else SmolLM2-135M-Instruct. Or a Flax module with the step contract
            of `jaxinfer.models.decoder.Decoder`: its prompts are token ids unless `tokenizer` is given.
        params: of a Flax module, a pytree like its state; the module's own when None.
        tokenizer: a folder, file or hub id, or a `Tokenizer`; the model's own when None.
        revision: of a hub id: branch, tag or commit.
        dtype: of parameters and activations; "auto" is float32 on CPUs, float16 on GPUs before sm_80, bfloat16 else.
        quantization: None, the only value yet: parameters are used in `dtype`.
        max_model_len: positions of prompt and output together; the model's own limit when None, as many as fit the
            memory, up to that limit, when "auto".
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step, prefill chunks and decodes together; at least max_num_seqs.
        gpu_memory_utilization: share to fill of an accelerator's memory; on a CPU, of the memory that is free.
        enable_prefix_caching: requests that begin alike share the pages of what is alike, at once and later.
        kv_cache_dtype: of keys and values in the cache; "auto" is `dtype`.
        tensor_parallel_size: 1, the only value yet.
        page_size: tokens a page of the cache holds; it changes no result.
        num_pages: pages of the cache; when None as many as max_num_seqs full sequences need and the memory holds, on
            CPUs up to 4 GB or one full sequence.
        batch_invariant: a request's tokens and log-probabilities do not depend, bit for bit, on the requests beside it.
            None is True on CPUs and False elsewhere, where True runs every step in one shape. False decodes one stream
            faster.
        overlap: start a step before the last one's tokens have been read; it changes no result.
        tenant_weights: shares of the tenants that requests name, 1 where none is given.
        logits_processors: device functions that requests may switch on by name.
        compilation_cache: a folder for compiled programs, which spares the next process most of its start. True is
            the user's folder for caches, False none; None is True unless jax's own persistent compilation cache is on.
            Programs of modules and logits processors of your own are not kept. Up to 1 GiB, what was used longest ago
            goes first; the folder must not be writable by others, since what it holds is run.
        seed: from which requests without a seed derive theirs.
        verbose: say on stderr what is loaded, and show progress bars in a terminal or notebook.

    Raises:
        ValueError: an argument out of its range; `MemoryPlanError`, a kind of it, where the model and its settings do
            not fit the memory, before weights are read.
        CheckpointError: a model that cannot be found or read.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        params: Any = None,
        tokenizer: str | PathLike[str] | Tokenizer | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | Literal["auto"] | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        gpu_memory_utilization: float | int = 0.9,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        batch_invariant: bool | None = None,
        overlap: bool = True,
        tenant_weights: Mapping[str, float | int] | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        compilation_cache: str | PathLike[str] | bool | None = None,
        seed: int = 0,
        verbose: bool = True,
    ):
        _check_values(quantization, tensor_parallel_size)
        check_seed(seed)
        processors = _check_processors(logits_processors)
        check_process()
        batch_invariant = _check_invariance(batch_invariant)
        cache = CacheConfig(page_size, num_pages, kv_cache_dtype, gpu_memory_utilization, enable_prefix_caching)
        asked = None if max_model_len == "auto" else max_model_len
        scheduler = SchedulerConfig(
            **({} if asked is None else {"max_model_len": asked}),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tenant_weights={} if tenant_weights is None else tenant_weights,
        )
        self._verbose = verbose and can_show()
        self._engine: Engine | None = None
        if (age_s := process_age_s()) is not None:
            log_phase("process start until now", age_s)
        with phase("model and tokenizer"):
            opening = open_model(model, params=params, tokenizer=tokenizer, revision=revision, dtype=dtype)
        with opening as opened:
            if verbose:
                print(f"jaxinfer: {opened.source}", file=sys.stderr)
            self.tokenizer = opened.tokenizer
            self.source = opened.source
            self.default_sampling_fields = default_sampling_fields(opened.model.generation_config)
            limit = opened.model.config.max_position
            length = limit if asked is None else asked
            if not 2 <= length <= limit:
                raise ValueError(f"max_model_len={length} must be from 2 up to the model's {limit}")
            config = EngineConfig(
                model=opened.model.config,
                cache=cache,
                scheduler=replace(scheduler, max_model_len=length),
                dtype=opened.dtype,
                seed=seed,
                batch_invariant=batch_invariant,
                overlap=overlap,
                fit_max_model_len=max_model_len == "auto",
                compilation_cache=compilation_cache,
            )
            self._engine = Engine(opened.model, self.tokenizer, config, processors)
        fitted = self._engine.config.scheduler.max_model_len
        if verbose and fitted < length:
            print(f"jaxinfer: max_model_len={fitted} fits the memory; the model's limit is {limit}", file=sys.stderr)
        self._ids = itertools.count()
        self._inboxes: dict[str, _Inbox] = {}
        self._has_stepped = False
        del opening, opened  # the engine has it; a traceback that holds this frame must not hold it too
        try:
            with progress_bar(desc="compiling", shown=self._verbose) as bar, phase("programs"):
                self._engine.warm_up(lambda done, total: _advance(bar, done, total))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        name = self.source.removeprefix("model: ")
        if self._engine is None:
            return f"LLM({name}, closed)"
        config = self._engine.config
        return f"LLM({name}, {config.dtype}, max_model_len={config.scheduler.max_model_len})"

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._engine

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the engine holds, planned before it held it; prints as a small table."""
        return self.engine.memory_plan

    @property
    def params(self) -> Any:
        """The parameters on the device, in the structure of the Flax module's state."""
        return self.engine.runner.params

    def update_params(self, params: Any) -> None:
        """Go on with other values of the parameters, between calls: nothing is compiled again.

        `params` has the structure of `LLM.params`, or is a nested dict of its arrays. Arrays of the right dtype and
        device are used as they are, so do not donate them elsewhere.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape.
            RuntimeError: requests are running.
        """
        self.engine.update_params(params)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, as `LLM.tokenizer` has it."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; used where a call gives no sampling_params."""
        return SamplingParams(**self.default_sampling_fields)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        timeout_s: float | int | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, `{"prompt": …}` or `{"prompt_token_ids": […]}`. Results are in their order.

        `sampling_params`, `priority` and `tenant` are for all prompts, or lists with one for each; see `RequestOptions`
        for what the options do. A prompt given as a mapping may have a `cache_salt`. A request that fails by itself has
        finish_reason "error". An interrupt aborts the requests and leaves the engine usable.

        Raises:
            ValueError: a prompt that is empty or too long, or a parameter that this model cannot honour.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params_of(sampling_params, len(prompts))
        salts = [prompt_salt(prompt) for prompt in prompts]
        options = options_of(len(prompts), priority, tenant, timeout_s, salts)
        requests: list[Request] = [
            (*self._encode(prompt), each, option) for prompt, each, option in zip(prompts, params, options, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        timeout_s: float | int | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or several; options as in `generate`.

        Raises:
            ValueError: `generate`'s reasons, a conversation that the template refuses, or a variable it never reads.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f'messages={messages!r:.60} must be a list of {{"role", "content"}}, or of such lists')
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        params = self._params_of(sampling_params, len(conversations))
        ids = [self.tokenizer.apply_chat_template(each, **template_variables) for each in conversations]
        options = options_of(len(ids), priority, tenant, timeout_s, cache_salt)
        return self._run([(None, *each) for each in zip(ids, params, options, strict=True)], use_tqdm)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Any],
        use_tqdm: bool = True,
    ) -> list[Any]:
        """Log-likelihoods of given continuations, each from one prefill that draws no token.

        One prompt with one continuation or several gives a list of `ContinuationScore`. Several prompts take as many
        entries, each one continuation or a list, and give a list with a list for each prompt.

        Raises:
            ValueError: a continuation or prompt without tokens, too long together, or lists of different lengths.
        """
        single = isinstance(prompts, str | Mapping)
        if not single and isinstance(continuations, str | Mapping):
            raise ValueError("score: several prompts need a list with one entry of continuations for each")
        asked = [prompts] if single else list(prompts)
        answers = [continuations] if single else list(continuations)
        if len(asked) != len(answers):
            raise ValueError(f"score: {len(asked)} prompts and {len(answers)} entries of continuations")
        groups = [[each] if isinstance(each, str | Mapping) else list(each) for each in answers]
        pairs = [
            join(self.tokenizer, prompt_content(prompt), prompt_content(each))
            for prompt, group in zip(asked, groups, strict=True)
            for each in group
        ]
        salts = [RequestOptions(cache_salt=prompt_salt(prompt)) for prompt in asked]
        options = [salt for salt, group in zip(salts, groups, strict=True) for _ in group]
        requests: list[Request] = [
            (None, ids, SCORE_PARAMS, option) for (ids, _), option in zip(pairs, options, strict=True)
        ]
        outputs = self._run(requests, use_tqdm, [first for _, first in pairs])
        scores = iter(
            score_of(output.prompt_logprobs or [], ids, first)
            for output, (ids, first) in zip(outputs, pairs, strict=True)
        )
        nested = [list(itertools.islice(scores, len(group))) for group in groups]
        return nested[0] if single else nested

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first. Raises `ValueError` for `generate`'s reasons."""
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        asked = [(self._encode(prompt)[1], prompt_salt(prompt)) for prompt in prompts]
        with progress_bar(unit="token", shown=use_tqdm and self._verbose) as bar:
            return search(self.engine, lambda requests: self._run(requests, False), asked, params, bar.update)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | int | None = None,
    ) -> Iterator[str]:
        """The text of one completion as it is made. Closing the iterator aborts the request; options as in `generate`.

        Raises:
            RequestError: the request failed, as where no token was allowed.
        """
        text, ids = self._encode(prompt)
        (params,) = self._params_of(sampling_params, 1)
        if params.num_choices != 1:
            raise ValueError(f"n={params.n}, best_of={params.best_of}: a stream has one choice")
        options = RequestOptions(priority, tenant, prompt_salt(prompt), timeout_s)
        request_id = str(next(self._ids))
        inbox: _Inbox = []
        try:
            try:
                with DeferredInterrupts():
                    self._add(request_id, (text, ids, params, options), inbox)
                finished = False
                while not finished:
                    if not inbox:
                        with DeferredInterrupts():
                            self._step(request_id)
                    received = inbox.copy()
                    inbox.clear()
                    for output, deltas in received:
                        finished = output.finished
                        if deltas[0]:
                            yield deltas[0]
                        raise_error(output)
            finally:
                with DeferredInterrupts():
                    self._drop([request_id])
        finally:  # once more, for an interrupt on the way into the section above
            self._drop([request_id])

    def stats(self) -> dict[str, float | int]:
        """Counts of the engine, as in `Engine.stats`: running, queued, pages, the prefix cache, compiled programs."""
        return self.engine.stats()

    def wait_until_compiled(self, timeout_s: float | int | None = None) -> None:
        """Wait for the programs that are compiled while the first requests run already: from then on nothing is.

        Raises:
            TimeoutError: they were not within `timeout_s`.
            RuntimeError: one could not be compiled, or the LLM was closed meanwhile.
        """
        self.engine.wait_until_compiled(timeout_s)

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        engine, self._engine = self._engine, None
        self._inboxes.clear()
        if engine is not None:
            engine.close()
            gc.collect()  # XLA lets go of the host arrays that it took over only when Python collects

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _params_of(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(isinstance(x, SamplingParams) for x in sampling_params):
            raise TypeError(f"sampling_params={sampling_params!r:.60} must be a SamplingParams or a list of them")
        if len(sampling_params) != count:
            raise ValueError(f"sampling_params has {len(sampling_params)} entries for {count} prompts")
        return list(sampling_params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        content = prompt_content(prompt)
        if isinstance(content, str):
            return content, self.tokenizer.encode(content)
        return (prompt.get("prompt") if isinstance(prompt, Mapping) else None), content

    def _run(
        self,
        requests: list[Request],
        use_tqdm: bool,
        first_scored: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        ids = [str(next(self._ids)) for _ in requests]
        results: dict[str, RequestOutput] = {}
        inbox: _Inbox = []
        num_tokens = 0
        bar = progress_bar(total=len(ids), unit="req", shown=use_tqdm and self._verbose)
        with bar, DeferredInterrupts() as interrupts:
            try:
                scored = first_scored or [1] * len(ids)
                for request_id, request, first in zip(ids, requests, scored, strict=True):
                    self._add(request_id, request, inbox, first)
                for request_id in ids:
                    while request_id not in results:
                        self._step(request_id)
                        interrupts.check()
                        finished = [output for output, _ in inbox if output.finished]
                        inbox.clear()
                        results.update((output.request_id, output) for output in finished)
                        num_tokens += sum(len(choice.token_ids) for output in finished for choice in output.outputs)
                        _show(bar, len(finished), num_tokens)
            finally:
                self._drop(ids)
        return [results[request_id] for request_id in ids]

    def _add(self, request_id: str, request: Request, inbox: _Inbox, first_scored: int = 1) -> None:
        text, prompt_ids, params, options = request
        self.engine.add(request_id, prompt_ids, params, text, first_scored, options)
        self._inboxes[request_id] = inbox

    def _step(self, request_id: str) -> None:
        """One step on behalf of a request; what it gives the others waits in their inboxes."""
        if not self.engine.has_work or request_id not in self._inboxes:
            raise EngineError("this request was aborted, or dropped when the step of another call failed; repeat it")
        try:
            with nullcontext() if self._has_stepped else phase("first step"):
                moved = self.engine.step()
            self._has_stepped = True
        except BaseException:
            self._drop(list(self._inboxes))  # the engine runs all requests together and has dropped them all
            raise
        for output, deltas in moved:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append((output, deltas))
            if output.finished:
                self._inboxes.pop(output.request_id, None)

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
            if self._engine is not None:
                self._engine.abort(request_id)


def _check_values(quantization: str | None, tensor_parallel_size: int) -> None:
    if quantization not in (None, "none"):
        raise ValueError(f"quantization={quantization!r} is not available; leave it out: parameters are used in dtype")
    if tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} is not available; it must be 1")


def _check_processors(processors: Any) -> list[LogitsProcessor]:
    good = isinstance(processors, Sequence) and all(isinstance(each, LogitsProcessor) for each in processors)
    if not good:
        raise ValueError(f"logits_processors={processors!r:.60} must be a list of jaxinfer.LogitsProcessor")
    return list(processors)


def raise_error(output: RequestOutput) -> None:
    choice = output.outputs[0]
    if choice.finish_reason == "error":
        raise RequestError(f"the request failed: {choice.stop_reason}")


def _check_invariance(batch_invariant: bool | None) -> bool:
    if not isinstance(batch_invariant, bool | None):
        raise ValueError(f"batch_invariant={batch_invariant!r} must be True, False or None")
    return jax.default_backend() == "cpu" if batch_invariant is None else batch_invariant


def _show(bar: Any, num_finished: int, num_tokens: int) -> None:
    if num_finished:
        bar.update(num_finished)
        bar.set_postfix_str(f"{num_tokens / (bar.format_dict['elapsed'] or 1):.0f} tokens/s")


def _advance(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
