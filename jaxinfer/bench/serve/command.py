"""The command `python -m jaxinfer.bench serve`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from jaxinfer.bench.environment import client_environment
from jaxinfer.bench.serve.arrivals import PROCESSES, Load
from jaxinfer.bench.serve.client import import_aiohttp, normalize_url
from jaxinfer.bench.serve.compare import Sizes, compare
from jaxinfer.bench.serve.jsonl import OURS, read_jsonl
from jaxinfer.bench.serve.measure import Plan, Target, measure
from jaxinfer.bench.serve.plot import check_picture, draw
from jaxinfer.bench.serve.prompts import (
    ENDPOINTS,
    PROMPT_SETS,
    Lengths,
    Session,
    multi_turn_sessions,
    random_sessions,
    shared_prefix_sessions,
)
from jaxinfer.bench.serve.report import as_text, failed
from jaxinfer.bench.serve.run import BodyFields
from jaxinfer.bench.serve.server import ChildServer, ended_by_signals
from jaxinfer.bench.serve.slo import parse_slo

_DEFAULT_NUM_REQUESTS = 64
_DEFAULT_CONCURRENCY = 8
_COMPARISON_SIZES = {"concurrency": 32, "num_requests": 64, "num_single": 6, "repeats": 3}
_OF_COMPARISON = {"compare_in_process", "model", "seed", "input_len", "output_len", "range_ratio", "vocab_size"}
_OF_COMPARISON |= {*_COMPARISON_SIZES, "run", "as_text"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `serve`."""
    server = command.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="of any OpenAI-compatible server (default: start our own)")
    server.add_argument("--model", help="its name at the server (default: the first of /v1/models), or what to serve")
    server.add_argument("--api-key", metavar="KEY")
    server.add_argument("--endpoint", choices=ENDPOINTS, default="completions")
    server.add_argument("--server-args", default="", metavar="FLAGS", help="further flags of the server we start")
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for each request")

    load = command.add_argument_group("load")
    load.add_argument("--rate", type=float, metavar="R", help="sessions/s, whatever the server does")
    load.add_argument("--arrivals", choices=PROCESSES, default="poisson", help="with --rate; burst is all at once")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="K", help="of gamma arrivals; 1 is Poisson")
    load.add_argument("--concurrency", type=int, metavar="N",
                      help=f"requests kept under way ({_DEFAULT_CONCURRENCY}), or the limit beside a rate")  # fmt: skip
    load.add_argument("--num-requests", type=int, metavar="N", help=f"default: {_DEFAULT_NUM_REQUESTS}")
    load.add_argument("--duration", type=float, metavar="S", help="send no request after this long")
    load.add_argument("--warmup", type=int, default=1, metavar="N", help="requests sent before, and not counted")
    load.add_argument("--seed", type=int, default=0)

    prompts = command.add_argument_group("prompts")
    prompts.add_argument("--prompts", choices=PROMPT_SETS, default="random")
    prompts.add_argument("--jsonl", metavar="FILE", help='one\'s own: {"prompt" or "messages", "max_tokens" …} a line')
    prompts.add_argument("--input-len", type=int, default=128, metavar="N", help="words, about a token each")
    prompts.add_argument("--output-len", type=int, default=64, metavar="N", help="max_tokens, where a line has none")
    prompts.add_argument("--range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by ±R of themselves")
    prompts.add_argument("--vocab-size", type=int, metavar="N", help="send token ids below N, not words")
    prompts.add_argument("--prefix-len", type=int, metavar="N", help="of shared-prefix (default: 256)")
    prompts.add_argument("--num-prefixes", type=int, metavar="N", help="of shared-prefix (default: 1)")
    prompts.add_argument("--turns", type=int, metavar="N", help="of multi-turn (default: 4)")
    prompts.add_argument("--temperature", type=float, default=0.0)
    prompts.add_argument("--ignore-eos", action="store_true", help="where the server takes it, all answers full length")
    prompts.add_argument("--count-logprobs", action="store_true", help="ask for log-probabilities, to count tokens by")

    prompts.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request")

    measures = command.add_argument_group("measures")
    measures.add_argument("--slo", nargs="+", type=_slo, default=[], metavar="L", help="ttft:500ms tpot:50ms e2e:5s")
    measures.add_argument("--find-rate", action="store_true", help="search the highest rate that meets the SLO")
    measures.add_argument("--share", type=float, metavar="P", help="of requests that must meet it (default: 0.9)")
    measures.add_argument("--max-runs", type=int, metavar="N", help="of the search (default: 8)")
    measures.add_argument("--allow-status", type=_statuses, default=(), metavar="N,N",
                          help="HTTP errors that are counted but are no failure, such as 429")  # fmt: skip
    measures.add_argument("--plot", metavar="FILE", help="draw it, as SVG or PNG by the name (needs matplotlib)")
    comparison = command.add_argument_group("comparison")
    comparison.add_argument("--compare-in-process", action="store_true",
                            help="what our server costs: the same requests through it and by LLM, in turn")  # fmt: skip
    comparison.add_argument("--repeats", type=int, metavar="N", help="of the comparison (default: 3)")
    comparison.add_argument("--num-single", type=int, metavar="N", help="requests sent one at a time (default: 6)")
    command.set_defaults(run=run, as_text=as_text)


def _slo(text: str) -> tuple[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a JSON object")
    if ours := [name for name in OURS if name in found]:
        raise argparse.ArgumentTypeError(f"{ours[0]} is set by the load generator; remove it")
    return found


def _statuses(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 400 <= int(part) <= 599 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers from 400 to 599 with commas between")
    return tuple(int(part) for part in parts)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a server as the arguments say; `exit_code` is 1 where a check failed.

    Raises:
        ValueError: arguments that make no sense, or a package that is missing.
        RuntimeError: the server cannot be reached or started.
    """
    load = os.getloadavg()[0]
    plan = None if arguments.compare_in_process else _plan(arguments)
    import_aiohttp()
    if plan is None:
        with ended_by_signals():
            return _report(arguments, load, "our own, and LLM", *_compare(arguments))
    if arguments.plot is not None:
        check_picture(arguments.plot)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        url, name = arguments.base_url, arguments.model
        if url is None:
            flags = [] if name is None else ["--model", name]
            server = stack.enter_context(ChildServer([*flags, *shlex.split(arguments.server_args)]))
            server.wait_until_idle()
            url = server.base_url
            name = None
        target = Target(url, arguments.endpoint, name, arguments.api_key, arguments.timeout)
        fields = BodyFields(arguments.temperature, arguments.ignore_eos, arguments.count_logprobs, arguments.extra_body)
        sent, results, model = measure(target, fields, plan, arguments.allow_status)
    if arguments.plot is not None:
        title = f"{model}: {results['requests_per_s']:.2f} requests/s, {results['output_tokens_per_s']:.1f} tokens/s"
        draw(arguments.plot, sent.records, sent.duration_s, plan.slo, title)
    return _report(arguments, load, url, results, [], model)


def _report(
    arguments: argparse.Namespace,
    load: float,
    server: str,
    results: dict[str, Any],
    targets: list[dict[str, Any]],
    model: str,
) -> dict[str, Any]:
    shown = _OF_COMPARISON if arguments.compare_in_process else vars(arguments)
    hidden = {"command", "run", "as_text", "json", "log_level", "api_key"}
    settings = {name: value for name, value in vars(arguments).items() if name in shown and name not in hidden}
    about = client_environment(server, model, load)
    settings = {name: value for name, value in settings.items() if value is not None}
    code = int(failed(results))
    return {"environment": about, "settings": settings, "results": results, "targets": targets, "exit_code": code}


def _compare(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(parser.parse_args([])).items():
        if getattr(arguments, name) != value and name not in _OF_COMPARISON:
            raise ValueError(f"--{name.replace('_', '-')} does not belong to --compare-in-process")
    given = {name: getattr(arguments, name) for name in ("concurrency", "num_requests", "num_single", "repeats")}
    numbers = _COMPARISON_SIZES | {name: value for name, value in given.items() if value is not None}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    vars(arguments).update(numbers)  # for the report
    lengths = Lengths(arguments.input_len, arguments.output_len, arguments.range_ratio, arguments.vocab_size)
    return compare(arguments.model, Sizes(lengths, seed=arguments.seed, **numbers))


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.base_url is not None:
        normalize_url(arguments.base_url)
        if arguments.server_args:
            raise ValueError("--server-args are for a server that is started here, not for that of --base-url")
    if arguments.timeout <= 0 or arguments.warmup < 0:
        raise ValueError("--timeout must be above 0, and --warmup 0 or more")
    if arguments.repeats is not None or arguments.num_single is not None:
        raise ValueError("--repeats and --num-single belong to --compare-in-process")
    slo = dict(arguments.slo)
    if len(slo) < len(arguments.slo):
        raise ValueError("--slo has two limits for one measure")
    share = 0.9 if arguments.share is None else arguments.share
    max_runs = 8 if arguments.max_runs is None else arguments.max_runs
    if not arguments.find_rate and (arguments.share is not None or arguments.max_runs is not None):
        raise ValueError("--share and --max-runs belong to --find-rate")
    if not 0 < share <= 1 or max_runs < 1:
        raise ValueError("--share must be above 0 and at most 1, and --max-runs 1 or more")
    if arguments.find_rate and not slo:
        raise ValueError("--find-rate needs --slo")
    rate, concurrency, number = arguments.rate, arguments.concurrency, arguments.num_requests
    if arguments.find_rate and rate is None:
        rate = 1.0
    sessions, num_lines = _sessions(arguments)
    if number is None and arguments.duration is None:
        number = num_lines or _DEFAULT_NUM_REQUESTS
    if rate is None and concurrency is None and arguments.arrivals != "burst":
        concurrency = _DEFAULT_CONCURRENCY
    arguments.rate, arguments.concurrency, arguments.num_requests = rate, concurrency, number  # for the report
    load = Load(rate, arguments.arrivals, arguments.burstiness, concurrency, number, arguments.duration, arguments.seed)
    return Plan(load, sessions, slo, arguments.warmup, share if arguments.find_rate else None, max_runs)


def _sessions(arguments: argparse.Namespace) -> tuple[Callable[[int], Iterator[Session]], int | None]:
    """Prompts by seed, and the number of lines where they come from a file."""
    sizes = {"prefix_len": arguments.prefix_len, "num_prefixes": arguments.num_prefixes, "turns": arguments.turns}
    belong = {"shared-prefix": ("prefix_len", "num_prefixes"), "multi-turn": ("turns",)}.get(arguments.prompts, ())
    for name, value in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and (name not in belong or arguments.jsonl is not None):
            raise ValueError(f"{flag} does not belong to these prompts")
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be 1 or more")
    lengths = Lengths(arguments.input_len, arguments.output_len, arguments.range_ratio, arguments.vocab_size)
    if arguments.vocab_size is not None and arguments.endpoint == "chat":
        raise ValueError("--vocab-size sends token ids, which need --endpoint completions")
    if arguments.jsonl is not None:
        if arguments.prompts != "random" or lengths != Lengths(output_len=lengths.output_len):
            raise ValueError("--jsonl brings its own prompts: leave out --prompts and all lengths but --output-len")
        lines = read_jsonl(arguments.jsonl, arguments.endpoint, arguments.output_len)
        return lambda seed: itertools.cycle(lines), len(lines)
    if arguments.prompts == "shared-prefix":
        prefix_len, num_prefixes = arguments.prefix_len or 256, arguments.num_prefixes or 1
        return lambda seed: shared_prefix_sessions(lengths, prefix_len, num_prefixes, seed), None
    if arguments.prompts == "multi-turn":
        num_turns = arguments.turns or 4
        if arguments.vocab_size is not None:
            raise ValueError("a conversation continues with the answer's text: leave out --vocab-size")
        return lambda seed: multi_turn_sessions(lengths, num_turns, seed), None
    return lambda seed: random_sessions(lengths, seed), None
