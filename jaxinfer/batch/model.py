"""What a job needs of a model, so that it does not need the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jaxinfer.batch.config import JobConfig, settings_of
from jaxinfer.batch.errors import JobError
from jaxinfer.batch.fingerprint import Fingerprint
from jaxinfer.batch.outputs import RESERVED
from jaxinfer.batch.requests import Requests
from jaxinfer.batch.worker import Runs
from jaxinfer.flags import served_name
from jaxinfer.request import SamplingParams


@runtime_checkable
class Engine(Runs, Protocol):
    """What runs requests, and tells how it goes."""

    def stats(self) -> dict[str, float | int]: ...


@dataclass(frozen=True)
class Model:
    """max_rows: choices that the engine is given at once.

    wait_until_compiled: returns when no step is slowed by a compiler beside it.
    """

    engine: Engine
    requests: Requests
    fingerprint: Fingerprint
    max_rows: int
    wait_until_compiled: Callable[[], object] = lambda: None


@contextlib.contextmanager
def open_llm(config: JobConfig) -> Iterator[Model]:
    """The model that a job names, loaded.

    Raises:
        ValueError: what `LLM` raises, or sampling settings that the model cannot honour.
    """
    from jaxinfer.batch.fingerprint import fingerprint_of
    from jaxinfer.llm import LLM

    with LLM(**config.llm_arguments()) as llm:
        settings: Any = llm.engine.config.scheduler
        vocab_size = llm.engine.config.model.vocab_size
        names = config.model_names or (served_name(config.model, llm.source),)
        requests = Requests(
            replace(config, model_names=names),
            llm.tokenizer,
            llm.default_sampling_fields,
            settings.max_model_len,
            vocab_size,
            RESERVED,
        )
        _check_sampling(llm, requests.params)
        # As many again as run, so that the engine can choose those that share what it has cached.
        max_rows = 2 * settings.max_num_seqs
        fingerprint = fingerprint_of(llm, settings_of(config))
        yield Model(llm.engine, requests, fingerprint, max_rows, llm.wait_until_compiled)


def _check_sampling(llm: Any, params: SamplingParams) -> None:
    """See that the job's own settings can be honoured, rather than blame its first record."""
    try:
        llm.engine.add("check", [0], params)
    except ValueError as error:
        raise JobError(f"the job's sampling settings: {error}") from None
    llm.engine.abort("check")
