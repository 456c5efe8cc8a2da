"""The flags of `python -m jaxinfer.batch`, on the command line or in a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jaxinfer.batch.config import FORMATS, ON_ERROR, ON_LONG_PROMPT, JobConfig
from jaxinfer.batch.fields import ARRAYS
from jaxinfer.flags import (
    Items,
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    add_model_flags,
    chat_template_source,
    json_object,
    parse_with_config,
)
from jaxinfer.phases import LOG_LEVELS
from jaxinfer.request import SamplingParams
from jaxinfer.structured.params import StructuredOutputsParams

_DESCRIPTION = "Write a result for each prompt in files, exactly once, however often the job is stopped and run again."
_EPILOG = f"""Sampling flags are the fields of jaxinfer.SamplingParams, and a record may hold any of them under the
field's own name; --seed is the job's, from which each record without a seed gets its own. There are no flags for
{" and ".join(ARRAYS)}: results hold no arrays."""
# Fields whose names LLM's settings have taken.
_RENAMED = {"logits_processors": "apply_logits_processors"}
_SAMPLING_HELP = {
    "n": "outputs of each prompt",
    "best_of": "of so many, the n likeliest",
    "temperature": "0 takes the likeliest token",
    "top_k": "0 for all",
    "logit_bias": 'by token id, as {"17": -5}',
    "allowed_token_ids": "no others are drawn",
    "bad_words": "never in the output",
    "logits_processors": 'those to use, as {"name": {"parameter": 1.5}}',
    "max_tokens": "of each output; or none: as many as the context holds",
    "stop": "texts that end an output",
    "logprobs": "have log-probabilities, and so many of the likeliest tokens",
    "prompt_logprobs": "the same, of the prompt's tokens",
    "structured_outputs": 'the form of the output, as {"json": {"type": "object"}}',
}


def sampling_flags() -> dict[str, str]:
    """The field of `SamplingParams` that each sampling flag sets, by the flag's name in the namespace."""
    left_out = {"seed", *ARRAYS}  # the job's seed is another
    return {
        _RENAMED.get(each.name, each.name): each.name for each in fields(SamplingParams) if each.name not in left_out
    }


def make_parser() -> argparse.ArgumentParser:
    """All flags, with their defaults."""
    parser = Parser(prog="python -m jaxinfer.batch", description=_DESCRIPTION, epilog=_EPILOG)
    add_config_flag(parser)
    _add_job_flags(parser)
    model = parser.add_argument_group("model")
    add_model_flags(model)
    model.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the source itself")
    model.add_argument(
        "--served-model-name",
        action=Items,
        default=(),
        metavar="NAME",
        help="what lines in the OpenAI batch format call it; its file's or folder's name",
    )
    _add_sampling_flags(parser.add_argument_group("sampling"))
    add_engine_flags(parser.add_argument_group("engine"))
    parser.set_defaults(batch_invariant=True)
    return parser


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("job")
    job.add_argument("--input", action=Items, default=(), metavar="GLOB", help="files of prompts: paths, globs, URLs")
    job.add_argument("--output", metavar="DIR", help="for the results: a folder, or a URL such as gs://bucket/results")
    job.add_argument("--state", type=Path, metavar="DIR", help="local, for the journal; in --output by default")
    job.add_argument("--format", choices=FORMATS, default="tfrecord", help="of the results")
    job.add_argument("--input-format", choices=FORMATS, help="of the inputs; by their names by default")
    job.add_argument(
        "--prompt-feature", default="prompt", metavar="NAME", help="the field that holds the prompt's text"
    )
    job.add_argument(
        "--pass-through", action=Items, metavar="NAME", help="fields to copy; all that mean nothing else by default"
    )
    job.add_argument("--on-error", choices=ON_ERROR, default="fail", help="where a record cannot be run")
    job.add_argument("--on-long-prompt", choices=ON_LONG_PROMPT, default="fail", help="where it leaves no room")
    job.add_argument("--records-per-shard", type=int, default=10_000, metavar="N", help="of each output file")
    job.add_argument("--limit", type=int, metavar="N", help="run the first N records only")
    job.add_argument(
        "--dry-run",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="only count, and estimate the time from a sample",
    )
    job.add_argument("--window", type=int, default=1024, metavar="N", help="records read ahead and sorted")
    job.add_argument(
        "--accept-changes",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="go on although the program or the machine is another",
    )
    job.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False, help="no progress")
    job.add_argument("--log-level", choices=LOG_LEVELS, default="warning")


def _add_sampling_flags(group: Any) -> None:
    hints = get_type_hints(SamplingParams)
    by_name = {each.name: each for each in fields(SamplingParams)}
    for dest, name in sampling_flags().items():
        settings = _kind(hints[name], by_name[name])
        flag = f"--{dest.replace('_', '-')}"
        group.add_argument(flag, default=argparse.SUPPRESS, help=_SAMPLING_HELP.get(name), **settings)


def _kind(hint: Any, of: Field[Any]) -> dict[str, Any]:
    """How a flag takes a field's values."""
    kinds = get_args(hint) or (hint,)
    origins = {getattr(kind, "__origin__", kind) for kind in kinds}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if origins & {StructuredOutputsParams, Mapping}:
        return {"type": json_object, "metavar": "JSON"}
    if Sequence in origins:
        of_numbers = Sequence[int] in kinds
        return {"action": Items, "type": int if of_numbers else str, "metavar": "ID" if of_numbers else "TEXT"}
    may_be_none = type(None) in kinds and of.default not in (None, MISSING)
    number = float if float in kinds else _whole_or_none if may_be_none else int
    return {"type": number, "metavar": "X" if number is float else "N"}


def _whole_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def parse(argv: Sequence[str] | None = None) -> JobConfig:
    """Flags as settings; those of the command line go before those of the file.

    Raises:
        UsageError: a flag or line that is unknown, missing or has no such value.
        SystemExit: after --help.
    """
    flags = vars(parse_with_config(make_parser(), argv))
    for name in ("input", "output"):
        if not flags[name]:
            raise UsageError(f"--{name} is missing; --help lists the flags")
    sampling = {name: flags.pop(dest) for dest, name in sampling_flags().items() if dest in flags}
    copied = flags.pop("pass_through")
    own = {
        "inputs": tuple(flags.pop("input")),
        "chat_template": chat_template_source(flags.pop("chat_template")),
        "model_names": tuple(flags.pop("served_model_name")),
        "pass_through": None if copied is None else tuple(copied),
        "sampling": sampling,
    }
    of_job = {each.name for each in fields(JobConfig)}
    engine = {name: value for name, value in flags.items() if name not in of_job | {"config"}}
    try:
        return JobConfig(**{name: value for name, value in flags.items() if name in of_job}, **own, engine=engine)
    except ValueError as error:
        raise UsageError(str(error)) from None
