"""The in-process doors: `LLM` and `generate`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxinfer.checkpoint.hub import resolve_model
from jaxinfer.checkpoint.reader import CheckpointError, open_checkpoint
from jaxinfer.config import DTYPES, CacheConfig, EngineConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineError
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.engine.load import load_model
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

Prompt = str | Mapping[str, Any]
_Inbox = list[tuple[RequestOutput, list[str]]]


class LLM:
    """A language model in this process.

    Args:
        model: a GGUF file, a Hugging Face folder, or a hub id; SmolLM2-135M-Instruct when None.
        dtype: of parameters and activations; "auto" is float32 on CPUs, float16 on GPUs before sm_80, bfloat16 else.
        max_model_len: positions of prompt and output together; the model's own limit when None.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step, prefill chunks and decodes together.
        page_size: tokens a page of the cache holds; it changes no result.
        num_pages: pages of the cache; as many as max_num_seqs full sequences need when None, up to 4 GB.
        seed: from which requests without a seed derive theirs.

    Raises:
        ValueError: an argument out of its range.
        CheckpointError: a model that cannot be found or read.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        page_size: int = 16,
        num_pages: int | None = None,
        seed: int = 0,
        verbose: bool = True,
    ):
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={dtype!r} must be auto, {', '.join(DTYPES)}")
        resolved = resolve_model(model, revision=revision, tokenizer=tokenizer)
        if resolved.kind == "orbax":
            raise CheckpointError(f"{resolved.path}: native checkpoints cannot be served yet; give the source model")
        self._verbose = verbose and sys.stderr.isatty()
        if verbose:
            print(f"jaxinfer: {resolved.source}", file=sys.stderr)
        dtype = _auto_dtype() if dtype == "auto" else dtype
        loaded = load_model(resolved.path, dtype)
        self.tokenizer = _tokenizer_of(resolved)
        limit = loaded.config.max_position
        length = limit if max_model_len is None else max_model_len
        if not 2 <= length <= limit:
            raise ValueError(f"max_model_len={length} must be from 2 up to the model's {limit}")
        config = EngineConfig(
            model=loaded.config,
            cache=CacheConfig(page_size=page_size, num_pages=num_pages or 0),
            scheduler=SchedulerConfig(length, max_num_seqs, max(max_num_batched_tokens, max_num_seqs)),
            dtype=dtype,
            seed=seed,
        )
        self._engine: Engine | None = Engine(loaded, self.tokenizer, config)
        self._ids = itertools.count()
        self._inboxes: dict[str, _Inbox] = {}
        self._source = resolved.source
        del loaded  # the engine has it; a traceback that holds this frame must not hold it too
        try:
            with tqdm(desc="compiling", disable=not self._verbose, leave=False) as bar:
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

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, `{"prompt": …}` or `{"prompt_token_ids": […]}`. Results are in their order.

        An interrupt aborts the requests and leaves the engine usable.

        Raises:
            ValueError: a prompt that is empty or too long, or a parameter that this model cannot honour.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = sampling_params or SamplingParams()
        requests = [(*self._encode(prompt), params) for prompt in prompts]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or several."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        params = sampling_params or SamplingParams()
        ids = [self.tokenizer.apply_chat_template(each, **template_variables) for each in conversations]
        return self._run([(None, each, params) for each in ids], use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion as it is made. Closing the iterator aborts the request."""
        text, ids = self._encode(prompt)
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n={params.n}: a stream has one choice")
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
            finally:
                with DeferredInterrupts():
                    self._drop([request_id])
        finally:  # once more, for an interrupt on the way into the section above
            self._drop([request_id])

    def stats(self) -> dict[str, int]:
        """Counts of the engine: running, queued, pages used and in all, compiled programs."""
        return self.engine.stats()

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        engine, self._engine = self._engine, None
        self._inboxes.clear()
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
        raise ValueError(f"a prompt needs 'prompt' (text) or 'prompt_token_ids'; got the keys {list(prompt)}")

    def _run(self, requests: list[tuple[str | None, list[int], SamplingParams]], use_tqdm: bool) -> list[RequestOutput]:
        ids = [str(next(self._ids)) for _ in requests]
        results: dict[str, RequestOutput] = {}
        inbox: _Inbox = []
        num_tokens = 0
        bar = tqdm(total=len(ids), unit="req", disable=not (use_tqdm and self._verbose), leave=False)
        with bar, DeferredInterrupts() as interrupts:
            try:
                for request_id, (text, prompt_ids, params) in zip(ids, requests, strict=True):
                    self._add(request_id, prompt_ids, params, text, inbox)
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
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, text: str | None, inbox: _Inbox
    ) -> None:
        self.engine.add(request_id, prompt_ids, params, text)
        self._inboxes[request_id] = inbox

    def _step(self, request_id: str) -> None:
        """One step on behalf of a request; what it gives the others waits in their inboxes."""
        if not self.engine.has_work or request_id not in self._inboxes:
            raise EngineError("this request was aborted, or dropped when the step of another call failed; repeat it")
        try:
            moved = self.engine.step()
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

    Returns:
        The text for one prompt, a list of texts for several.
    """
    if model not in _kept:
        _kept.clear()
        _kept[model] = LLM(model)
    outputs = _kept[model].generate(prompts, SamplingParams(**fields))
    texts = [output.outputs[0].text for output in outputs]
    return texts[0] if isinstance(prompts, str | Mapping) else texts


_kept: dict[str | None, LLM] = {}


def _show(bar: Any, num_finished: int, num_tokens: int) -> None:
    if num_finished:
        bar.update(num_finished)
        bar.set_postfix_str(f"{num_tokens / (bar.format_dict['elapsed'] or 1):.0f} tokens/s")


def _advance(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _auto_dtype() -> str:
    if jax.default_backend() == "cpu":
        return "float32"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return "float16" if capability is not None and float(capability) < 8.0 else "bfloat16"


def _tokenizer_of(resolved: Any) -> Tokenizer:
    path = resolved.tokenizer
    if path.is_dir():
        return load_tokenizer(path)
    with open_checkpoint(path) as checkpoint:
        return tokenizer_from_gguf(checkpoint.config)
