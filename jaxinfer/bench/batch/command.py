"""The command `python -m jaxinfer.bench batch`: its arguments, and its report."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.bench.batch.compare import measure_batch
from jaxinfer.bench.batch.memory import measure_memory
from jaxinfer.bench.environment import client_environment
from jaxinfer.bench.report import as_text, target

OVER_GENERATE = 0.95
STAND_IN_RECORDS_PER_S = 5_000
_SETTINGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `batch`."""
    command.add_argument("--model", help="a GGUF file, a Hugging Face folder or a hub id (default: SmolLM2-135M)")
    command.add_argument("--repeats", type=int, default=3, metavar="N")
    command.add_argument("--records", type=int, default=96, metavar="N", help="prompts in each run (default: 96)")
    command.add_argument("--prefixes", type=int, default=4, metavar="N", help="half of the prompts have one of so many")
    command.add_argument("--prefix-words", type=int, default=64, metavar="N", help="of each (default: 64)")
    command.add_argument("--output-tokens", type=int, metavar="N", help="of a record at most (default: 48; 8 of short)")
    command.add_argument("--windows", type=_numbers, default=[1024], metavar="N,N,…", help="--window of each job")
    command.add_argument("--max-model-len", type=int, default=512, metavar="N")
    command.add_argument("--max-num-seqs", type=int, default=16, metavar="N")
    command.add_argument("--max-num-batched-tokens", type=int, default=256, metavar="N")
    command.add_argument("--num-pages", type=int, metavar="N", help="of the cache (default: what fits)")
    memory = command.add_argument_group("memory, in place of the comparison")
    memory.add_argument("--memory", type=int, metavar="N", help="run N short records once, and watch the memory")
    memory.add_argument("--stand-in", action="store_true", help="without a model: all of a job but the engine")
    command.set_defaults(run=run, as_text=as_text)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for.

    Raises:
        ValueError: arguments that make no sense.
        RuntimeError: a process failed.
    """
    given = vars(arguments)
    numbers = ("repeats", "records", "output_tokens", "prefix_words", "memory", "num_pages", *_SETTINGS)
    if wrong := next((name for name in numbers if given[name] is not None and given[name] < 1), None):
        raise ValueError(f"--{wrong.replace('_', '-')} {given[wrong]} must be at least 1")
    if min(arguments.windows) < 1 or arguments.prefixes < 0:
        raise ValueError("--windows are from 1 up, --prefixes from 0")
    return _compare(arguments) if arguments.memory is None else _memory(arguments)


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.stand_in:
        raise ValueError("--stand-in goes with --memory: there is no LLM.generate without a model")
    engine = {name: getattr(arguments, name) for name in _SETTINGS} | {"batch_invariant": True}
    engine |= {} if arguments.num_pages is None else {"num_pages": arguments.num_pages}
    asked = {
        "num_records": arguments.records,
        "num_prefixes": arguments.prefixes,
        "prefix_words": arguments.prefix_words,
        "output_tokens": arguments.output_tokens or 48,
        "windows": arguments.windows,
        "repeats": arguments.repeats,
    }
    environment, results = measure_batch(arguments.model, engine, **asked)
    targets = [
        target(f"over_generate, window {row['window']}", row["over_generate"]["median"], at_least=OVER_GENERATE)
        for row in results["jobs"]
    ]
    return {"environment": environment, "settings": asked | engine, "results": results, "targets": targets}


def _memory(arguments: argparse.Namespace) -> dict[str, Any]:
    import os

    output_tokens = arguments.output_tokens or 8
    flags = [word for name in _SETTINGS for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    load = os.getloadavg()[0]
    stand_in = arguments.stand_in
    results = measure_memory(
        arguments.memory, output_tokens, stand_in=stand_in, model=arguments.model, flags=() if stand_in else flags
    )
    model = "none: a stand-in" if stand_in else arguments.model or "the default"
    environment = client_environment("python -m jaxinfer.batch", model, load)
    targets = [target("faults of memory", int(results["growth"] != "none"), at_most=0)]
    if stand_in:
        targets.append(target("records_per_s", results["records_per_s"], at_least=STAND_IN_RECORDS_PER_S))
    settings = {"records": arguments.memory, "output_tokens": output_tokens, "stand_in": stand_in}
    return {"environment": environment, "settings": settings, "results": results, "targets": targets}
