"""The settings of a job. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxinfer.batch.fields import sampling_params
from jaxinfer.config import check_seed
from jaxinfer.flags import load_processors

Format = Literal["tfrecord", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("tfrecord", "jsonl", "parquet")
OnError = Literal["fail", "skip", "record"]
OnLongPrompt = Literal["fail", "skip", "truncate-left", "truncate-right"]
ON_ERROR: tuple[OnError, ...] = ("fail", "skip", "record")
ON_LONG_PROMPT: tuple[OnLongPrompt, ...] = ("fail", "skip", "truncate-left", "truncate-right")


@dataclass(frozen=True)
class JobConfig:
    """What a job reads, how it runs and where the results go.

    inputs: files or globs, local or fsspec URLs.
    output: the folder for results, local or an fsspec URL.
    state: the local folder for the journal; None is one in `output`, which must be local then.
    format: of the results.
    input_format: of the inputs; None is by their names.
    prompt_feature: of a record, what holds the prompt's text.
    pass_through: fields that are copied to the results; None is all that mean nothing else.
    model, engine: the arguments of `LLM`; `engine["logits_processors"]` holds places as `package.module:NAME`.
    chat_template: Jinja source or a template's name, in place of the model's own.
    model_names: what lines in the OpenAI batch format may call the model; none is what the server would call it.
    sampling: fields of `SamplingParams` as JSON has them, over what the model recommends; records go before them.
    seed: of the job, from which each record without a seed gets its own.
    on_error: what follows from a record that cannot be run: the job fails, the record is left out, or its error is
        written in its result's place. It is counted and told in each case.
    on_long_prompt: with a prompt that leaves no room for a token, "fail" has the job fail, whatever `on_error` says;
        "skip" has an error; "truncate-left" and "truncate-right" drop tokens at its beginning or end.
    records_per_shard: records of one input file that make one output file.
    limit: of all records, how many are run; None is all.
    dry_run: only count and estimate.
    window: records that are read ahead and sorted, to keep the engine full.
    accept_changes: go on with a job although the program or the machine is another than when it began.
    quiet: no progress.

    Raises:
        ValueError: a field out of its range.
    """

    inputs: tuple[str, ...]
    output: str
    state: Path | None = None
    format: Format = "tfrecord"
    input_format: Format | None = None
    prompt_feature: str = "prompt"
    pass_through: tuple[str, ...] | None = None
    model: str | None = None
    engine: Mapping[str, Any] = field(default_factory=lambda: {"batch_invariant": True})
    chat_template: str | None = None
    model_names: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    on_error: OnError = "fail"
    on_long_prompt: OnLongPrompt = "fail"
    records_per_shard: int = 10_000
    limit: int | None = None
    dry_run: bool = False
    window: int = 1024
    accept_changes: bool = False
    quiet: bool = False
    log_level: str = "warning"

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("input is missing: give files or globs")
        if not self.output:
            raise ValueError("output is missing: give a folder for the results")
        if self.state is None and is_remote(self.output):
            raise ValueError(f"output={self.output} is not on this machine: give a local folder for the journal, state")
        if self.state is not None and re.match(r"\w{2,}:/", str(self.state)):
            raise ValueError(f"state={self.state} must be a local folder: the journal needs its locks and its fsync")
        for name, known in (("format", FORMATS), ("on_error", ON_ERROR), ("on_long_prompt", ON_LONG_PROMPT)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        if self.input_format is not None and self.input_format not in FORMATS:
            raise ValueError(f"input_format={self.input_format!r} must be one of {', '.join(FORMATS)}")
        if not self.prompt_feature:
            raise ValueError("prompt_feature is empty: give the name of the field that holds the prompt")
        for name in ("records_per_shard", "limit", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        check_seed(self.seed)
        sampling_params({"max_tokens": None, **self.sampling})

    def llm_arguments(self) -> dict[str, Any]:
        """The arguments of `LLM`; imports the modules of logits processors.

        Raises:
            UsageError: a logits processor that is not there.
        """
        own = {"model": self.model, "seed": self.seed, "verbose": not self.quiet}
        processors = load_processors(self.engine.get("logits_processors", ()))
        return {**self.engine, **own, "logits_processors": processors}


_OF_RESULTS = (
    "format", "input_format", "prompt_feature", "pass_through", "chat_template", "model_names", "sampling", "seed",
    "records_per_shard", "limit",
)  # fmt: skip
_POLICIES = "on_error", "on_long_prompt"


def settings_of(config: JobConfig) -> dict[str, Any]:
    """The settings that results follow from, beside the model's and the engine's own."""
    return {name: getattr(config, name) for name in _OF_RESULTS}


def policies_of(config: JobConfig) -> dict[str, str]:
    """What a job does about records that cannot be run. Where that is "fail", no result follows from it, so that a job
    may go on with another."""
    return {name: getattr(config, name) for name in _POLICIES}


def is_remote(path: str) -> bool:
    """Whether a path is the URL of a store, rather than of a local file."""
    return "://" in path and not path.startswith("file://")


def local_folder(path: str) -> Path:
    """A local folder, which may be named by its URL."""
    return Path(path.removeprefix("file://")).expanduser()
