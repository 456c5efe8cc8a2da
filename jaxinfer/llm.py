"""The in-process doors: `LLM` and `generate`."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import jax

from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig, check_seed
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineError, RequestError
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.open import default_sampling_fields, open_model
from jaxinfer.phases import log_phase, phase, process_age_s
from jaxinfer.progress import can_show, progress_bar
from jaxinfer.request import RequestOutput, SamplingParams, plain_ids
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.scoring import SCORE_PARAMS, join, score_of
from jaxinfer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
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
        max_model_len: positions of prompt and output together; the model's own limit when None.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step, prefill chunks and decodes together; at least max_num_seqs.
        gpu_memory_utilization: share of an accelerator's memory for parameters and cache; see `num_pages` for CPUs.
        enable_prefix_caching: requests do not share pages yet, so neither value changes anything.
        kv_cache_dtype: of keys and values in the cache; "auto" is `dtype`.
        tensor_parallel_size: 1, the only value yet.
        page_size: tokens a page of the cache holds; it changes no result.
        num_pages: pages of the cache; as many as max_num_seqs full sequences need when None, on CPUs up to 4 GB.
        batch_invariant: a request's tokens and log-probabilities do not depend, bit for bit, on the requests beside it.
            None is True on CPUs, False elsewhere, where True is not available yet. False decodes one stream faster.
        logits_processors: device functions that requests may switch on by name.
        compilation_cache: a folder for compiled programs, which spares the next process most of its start. True is
            the user's folder for caches, False none; None is True unless jax's own persistent compilation cache is on.
            Programs of modules and logits processors of your own are not kept. Up to 1 GiB, what was used longest ago
            goes first; the folder must not be writable by others, since what it holds is run.
        seed: from which requests without a seed derive theirs.
        verbose: say on stderr what is loaded, and show progress bars in a terminal or notebook.

    Raises:
        ValueError: an argument out of its range.
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
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        gpu_memory_utilization: float | int = 0.9,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        batch_invariant: bool | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        compilation_cache: str | PathLike[str] | bool | None = None,
        seed: int = 0,
        verbose: bool = True,
    ):
        _check_values(quantization, tensor_parallel_size, enable_prefix_caching)
        check_seed(seed)
        processors = _check_processors(logits_processors)
        batch_invariant = _check_invariance(batch_invariant)
        cache = CacheConfig(page_size, num_pages, kv_cache_dtype, gpu_memory_utilization)
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        scheduler = SchedulerConfig(**limits) if max_model_len is None else SchedulerConfig(max_model_len, **limits)
        self._verbose = verbose and can_show()
        if (age_s := process_age_s()) is not None:
            log_phase("process start until now", age_s)
        with phase("model and tokenizer"):
            opened = open_model(model, params=params, tokenizer=tokenizer, revision=revision, dtype=dtype)
        if verbose:
            print(f"jaxinfer: {opened.source}", file=sys.stderr)
        self.tokenizer = opened.tokenizer
        self._source = opened.source
        self._default_fields = default_sampling_fields(opened.loaded.generation_config)
        limit = opened.loaded.config.max_position
        length = limit if max_model_len is None else max_model_len
        if not 2 <= length <= limit:
            raise ValueError(f"max_model_len={length} must be from 2 up to the model's {limit}")
        config = EngineConfig(
            model=opened.loaded.config,
            cache=cache,
            scheduler=replace(scheduler, max_model_len=length),
            dtype=opened.dtype,
            seed=seed,
            batch_invariant=batch_invariant,
            compilation_cache=compilation_cache,
        )
        self._engine: Engine | None = Engine(opened.loaded, self.tokenizer, config, processors)
        self._ids = itertools.count()
        self._inboxes: dict[str, _Inbox] = {}
        self._has_stepped = False
        del opened  # the engine has it; a traceback that holds this frame must not hold it too
        try:
            with progress_bar(desc="compiling", shown=self._verbose) as bar, phase("programs"):
                self._engine.warm_up(lambda done, total: _advance(bar, done, total))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        name = self._source.removeprefix("model: ")
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
        if self.engine.has_work:
            raise RuntimeError("update_params: requests are running, and would go on with keys of the old parameters")
        self.engine.runner.update_params(params)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, as `LLM.tokenizer` has it."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; used where a call gives no sampling_params."""
        return SamplingParams(**self._default_fields)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, `{"prompt": …}` or `{"prompt_token_ids": […]}`. Results are in their order.

        `sampling_params` are for all prompts, or a list with one for each. An interrupt aborts the requests and leaves
        the engine usable.

        Raises:
            ValueError: a prompt that is empty or too long, or a parameter that this model cannot honour.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params_of(sampling_params, len(prompts))
        return self._run(
            [(*self._encode(prompt), each) for prompt, each in zip(prompts, params, strict=True)], use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or several.

        Raises:
            ValueError: `generate`'s reasons, a conversation that the template refuses, or a variable it never reads.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f'messages={messages!r:.60} must be a list of {{"role", "content"}}, or of such lists')
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        params = self._params_of(sampling_params, len(conversations))
        ids = [self.tokenizer.apply_chat_template(each, **template_variables) for each in conversations]
        return self._run([(None, prompt, each) for prompt, each in zip(ids, params, strict=True)], use_tqdm)

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
            join(self.tokenizer, _content(prompt), _content(each))
            for prompt, group in zip(asked, groups, strict=True)
            for each in group
        ]
        outputs = self._run([(None, ids, SCORE_PARAMS) for ids, _ in pairs], use_tqdm, [first for _, first in pairs])
        scores = iter(
            score_of(output.prompt_logprobs or [], ids, first)
            for output, (ids, first) in zip(outputs, pairs, strict=True)
        )
        nested = [list(itertools.islice(scores, len(group))) for group in groups]
        return nested[0] if single else nested

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion as it is made. Closing the iterator aborts the request.

        Raises:
            RequestError: the request failed, as where no token was allowed.
        """
        text, ids = self._encode(prompt)
        (params,) = self._params_of(sampling_params, 1)
        if params.num_choices != 1:
            raise ValueError(f"n={params.n}, best_of={params.best_of}: a stream has one choice")
        request_id = str(next(self._ids))
        inbox: _Inbox = []
        try:
            try:
                with DeferredInterrupts():
                    self._add(request_id, ids, params, text, inbox)
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
                        _raise_error(output)
            finally:
                with DeferredInterrupts():
                    self._drop([request_id])
        finally:  # once more, for an interrupt on the way into the section above
            self._drop([request_id])

    def stats(self) -> dict[str, int | float]:
        """Counts of the engine: running, queued, pages used and in all, programs compiled and loaded, padding."""
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
        content = _content(prompt)
        if isinstance(content, str):
            return content, self.tokenizer.encode(content)
        return (prompt.get("prompt") if isinstance(prompt, Mapping) else None), content

    def _run(
        self,
        requests: list[tuple[str | None, list[int], SamplingParams]],
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
                for request_id, (text, prompt_ids, params), first in zip(ids, requests, scored, strict=True):
                    self._add(request_id, prompt_ids, params, text, inbox, first)
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

    def _add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        text: str | None,
        inbox: _Inbox,
        first_scored: int = 1,
    ) -> None:
        self.engine.add(request_id, prompt_ids, params, text, first_scored)
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


def generate(prompts: Prompt | Sequence[Prompt], model: str | None = None, **fields: Any) -> str | list[str]:
    """Complete one prompt or several with a model that is loaded once and kept; `fields` are `SamplingParams`'.

    Where neither `fields` nor the model's `generation_config.json` set a temperature it is 0: the likeliest tokens, the
    same on every call.

    Returns:
        The text for one prompt, a list of texts for several.

    Raises:
        ValueError: a bad prompt or field, or a field whose result is more than a text (`n`, `logprobs` …).
        RequestError: a request failed, as where no token was allowed.
    """
    for name in ("n", "best_of", "logprobs", "prompt_logprobs", "return_hidden_states", "return_logits"):
        if name in fields:
            raise ValueError(f"{name}={fields[name]!r}: generate() returns one text a prompt; use LLM.generate")
    if model not in _kept:
        for other in _kept.values():
            other.close()  # before the next one takes its memory
        _kept.clear()
        _kept[model] = LLM(model)
    llm = _kept[model]
    params = SamplingParams(**{"temperature": 0.0, **llm._default_fields, **fields})
    outputs = llm.generate(prompts, params)
    for output in outputs:
        _raise_error(output)
    texts = [output.outputs[0].text for output in outputs]
    return texts[0] if isinstance(prompts, str | Mapping) else texts


_kept: dict[str | None, LLM] = {}


def _content(prompt: Any) -> str | list[int]:
    """A prompt's text or token ids. Raises `ValueError` for one that has neither."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}, key=str):
            raise ValueError(f"prompt: {unknown[0]!r} is not supported; a prompt needs 'prompt' or 'prompt_token_ids'")
        if prompt.get("prompt_token_ids") is not None:
            return plain_ids("prompt_token_ids", prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"]
        raise ValueError(f"a prompt needs 'prompt' (text) or 'prompt_token_ids'; got the keys {list(prompt)}")
    raise ValueError(f"a prompt is a text or a mapping with 'prompt' or 'prompt_token_ids', not {prompt!r:.60}")


def _check_values(quantization: str | None, tensor_parallel_size: int, enable_prefix_caching: bool) -> None:
    if quantization not in (None, "none"):
        raise ValueError(f"quantization={quantization!r} is not available; leave it out: parameters are used in dtype")
    if tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} is not available; it must be 1")
    if not isinstance(enable_prefix_caching, bool):
        raise ValueError(f"enable_prefix_caching={enable_prefix_caching!r} must be True or False")


def _check_processors(processors: Any) -> list[LogitsProcessor]:
    good = isinstance(processors, Sequence) and all(isinstance(each, LogitsProcessor) for each in processors)
    if not good:
        raise ValueError(f"logits_processors={processors!r:.60} must be a list of jaxinfer.LogitsProcessor")
    return list(processors)


def _raise_error(output: RequestOutput) -> None:
    choice = output.outputs[0]
    if choice.finish_reason == "error":
        raise RequestError(f"the request failed: {choice.stop_reason}")


def _check_invariance(batch_invariant: bool | None) -> bool:
    if batch_invariant not in (None, True, False):
        raise ValueError(f"batch_invariant={batch_invariant!r} must be True, False or None")
    on_cpu = jax.default_backend() == "cpu"
    if batch_invariant and not on_cpu:
        raise ValueError(f"batch_invariant=True is not available on {jax.default_backend()}: leave it out")
    return on_cpu if batch_invariant is None else batch_invariant


def _show(bar: Any, num_finished: int, num_tokens: int) -> None:
    if num_finished:
        bar.update(num_finished)
        bar.set_postfix_str(f"{num_tokens / (bar.format_dict['elapsed'] or 1):.0f} tokens/s")


def _advance(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
