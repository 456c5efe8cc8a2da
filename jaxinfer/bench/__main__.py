"""`python -m jaxinfer.bench COMMAND`: how far from the machine's limits we are, and whether the promises hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jaxinfer.bench.batch.command import add_arguments as add_batch_arguments
from jaxinfer.bench.report import as_json, as_text, target
from jaxinfer.bench.serve.command import add_arguments as add_serve_arguments
from jaxinfer.bench.soak.command import add_arguments as add_soak_arguments
from jaxinfer.config import DTYPES
from jaxinfer.phases import LOG_LEVELS, show_logs

_COMMON = ("command", "run", "json", "profile", "log_level", "as_text")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the arguments)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark and print its report.

    Returns 2, after one line, for arguments that make no sense, and 1 where a server's answers were not in order.
    """
    arguments = make_parser().parse_args(argv)
    show_logs(arguments.log_level)
    try:
        report = arguments.run(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    code = report.pop("exit_code", 0)
    report = {"benchmark": arguments.command, **report}
    print(as_json(report) if arguments.json else arguments.as_text(report))
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m jaxinfer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, repeats: int, summary: str, probes: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run, as_text=as_text)
        command.add_argument("--model", help="a GGUF file, a Hugging Face folder or a hub id (default: SmolLM2-135M)")
        command.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
        _add_output(command)
        if repeats:
            command.add_argument("--repeats", type=_positive, default=repeats, metavar="N")
            command.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=None,
                                 help="whether a row's bits are the same whatever rows are beside it")  # fmt: skip
        if repeats and probes:
            command.add_argument("--probe-bytes", type=_positive, default=512 * 2**20, metavar="BYTES",
                                 help="size of the array whose reading gives the bandwidth")  # fmt: skip
        return command

    latency = add("latency", _latency, 3, "one stream: TTFT, time per token, decode step over the weight-read floor")
    throughput = add(
        "throughput", _throughput, 3, "output tokens/s at several numbers of streams, and the host's share"
    )
    for command, num_prompt_tokens in ((latency, 128), (throughput, 32)):
        command.add_argument("--prompt-tokens", type=_positive, default=num_prompt_tokens, metavar="N")
        command.add_argument("--output-tokens", type=_at_least_four, default=64, metavar="N")
    throughput.add_argument("--streams", type=_positive_list, default=[1, 8, 32], metavar="N,N,…")
    throughput.add_argument("--profile", action="store_true", help="print each phase of a step")
    summary = "host and device time of each phase of a decode step, with overlap and without"
    profile = add("profile", _profile, 6, summary, probes=False)
    profile.add_argument("--rows", type=_positive, default=32, metavar="N", help="streams that decode together")
    profile.add_argument("--prompt-tokens", type=_positive, default=32, metavar="N")
    prefix = add("prefix", _prefix, 2, "what the prefix cache saves: chat, a shared prompt, few shots", probes=False)
    prefix.add_argument("--turns", type=_positive, default=4, metavar="N", help="of the chat")
    prefix.add_argument("--requests", type=_positive, default=8, metavar="N", help="that share a prefix")
    prefix.add_argument("--prefix-tokens", type=_positive, default=256, metavar="N")
    context = add("context", _context, 4, "decode time against context length, over the time of reading the cache")
    context.add_argument("--contexts", type=_context_list, default=[512, 2048, 4096, 8000], metavar="N,N,…")
    context.add_argument("--steps", type=_positive, default=8, metavar="N", help="at each length, in each repeat")
    add("load-memory", _load_memory, 0, "peak host memory while the model loads")
    add("invariance", _invariance, 0, "one request alone, among others, cached, preempted …: are the bits the same?")
    fairness = add("fairness", _fairness, 0, "simulated: what a tenant waits beside another with a hundred requests")
    fairness.add_argument("--plot", metavar="FILE", help="draw it, as SVG or PNG by the name (needs matplotlib)")
    start = add("start", _start, 0, "from the start of a process to its first token, without and with stored programs")
    start.add_argument("--repeats", type=_positive, default=3, metavar="N", help="starts with stored programs")
    summary = "load on any OpenAI-compatible server: latencies, throughput, goodput, and checks of its answers"
    serve = commands.add_parser("serve", help=summary, description=summary)
    add_serve_arguments(serve)
    _add_output(serve)
    summary = "everything that clients do to a server, for minutes: are its answers right, and does it keep nothing?"
    soak = commands.add_parser("soak", help=summary, description=summary)
    add_soak_arguments(soak)
    _add_output(soak)
    summary = "the batch command: output tokens/s over LLM.generate's, or its memory over many records"
    batch = commands.add_parser("batch", help=summary, description=summary)
    add_batch_arguments(batch)
    _add_output(batch)
    return parser


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    command.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="info shows phases of the start")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _at_least_four(text: str) -> int:
    if _positive(text) < 4:
        raise argparse.ArgumentTypeError(f"{text} leaves too few decode steps to time; give 4 or more")
    return int(text)


def _positive_list(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _context_list(text: str) -> list[int]:
    contexts = _positive_list(text)
    if len(contexts) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a slope needs two different lengths or more")
    return contexts


def _make_llm(arguments: argparse.Namespace, num_prompt_tokens: int, **limits: int) -> tuple[Any, dict[str, Any]]:
    """The model, and what every report says of it.

    `limits` are the model's; steps take no more tokens than a benchmark can fill, so that no unused shape is compiled.
    """
    from jaxinfer.bench.environment import environment
    from jaxinfer.checkpoint.hub import resolve_model
    from jaxinfer.llm import LLM

    source = resolve_model(arguments.model).source
    limits["max_num_batched_tokens"] = min(512, num_prompt_tokens)
    chosen = {} if arguments.batch_invariant is None else {"batch_invariant": arguments.batch_invariant}
    llm = LLM(arguments.model, dtype=arguments.dtype, **limits, **chosen)
    llm.wait_until_compiled()
    settings = {name: value for name, value in vars(arguments).items() if name not in _COMMON} | limits
    about = {"environment": environment(llm.engine.config.dtype, source), "settings": settings}
    return llm, about


def _latency(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.bandwidth import BandwidthProbe, weight_bytes
    from jaxinfer.bench.latency import measure_latency

    length = arguments.prompt_tokens + arguments.output_tokens
    llm, about = _make_llm(arguments, arguments.prompt_tokens, max_num_seqs=1, max_model_len=length)
    with llm:
        results = measure_latency(
            llm.engine,
            BandwidthProbe(arguments.probe_bytes),
            weight_bytes(llm.engine.config),
            num_prompt_tokens=arguments.prompt_tokens,
            num_output_tokens=arguments.output_tokens,
            repeats=arguments.repeats,
        )
        limit = 3.0 if llm.engine.config.batch_invariant else 1.8
    ratio = results["decode_step_over_floor"]["median"]
    return {**about, "results": results, "targets": [target("decode_step_over_floor", ratio, at_most=limit)]}


def _throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.bandwidth import BandwidthProbe, weight_bytes
    from jaxinfer.bench.step_profile import tokens_needed
    from jaxinfer.bench.throughput import measure_throughput

    arguments.streams = sorted({1, *arguments.streams})
    most = arguments.streams[-1]
    length = arguments.prompt_tokens + max(arguments.output_tokens, tokens_needed(2))
    llm, about = _make_llm(arguments, most * arguments.prompt_tokens, max_num_seqs=most, max_model_len=length)
    with llm:
        results = measure_throughput(
            llm.engine,
            BandwidthProbe(arguments.probe_bytes),
            weight_bytes(llm.engine.config),
            streams=arguments.streams,
            num_prompt_tokens=arguments.prompt_tokens,
            num_output_tokens=arguments.output_tokens,
            repeats=arguments.repeats,
        )
    targets = []
    if most == 32:
        scaling, (host,) = results["streams"][-1]["over_one_stream"], results["host"]["steps"]
        targets = [
            target("over_one_stream at 32", scaling["median"], at_least=5.0),
            target("host_share at 32", host["host_share"]["median"], at_most=0.08),
        ]
    if not arguments.profile:
        del results["host"]["steps"][0]["phases_s"]
    return {**about, "results": results, "targets": targets}


def _profile(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.step_profile import measure_profile, tokens_needed
    from jaxinfer.bench.workload import random_prompts

    length = arguments.prompt_tokens + tokens_needed(3)
    llm, about = _make_llm(
        arguments, arguments.rows * arguments.prompt_tokens, max_num_seqs=arguments.rows, max_model_len=length
    )
    with llm:
        prompts = random_prompts(arguments.rows, arguments.prompt_tokens, llm.engine.config.model.vocab_size)
        results = measure_profile(llm.engine, prompts, repeats=arguments.repeats, overlap=[True, False])
    share = results["steps"][0]["host_share"]["median"]
    return {**about, "results": results, "targets": [target("host_share with overlap", share, at_most=0.03)]}


def _prefix(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.prefix import Sizes, measure_prefix

    sizes = Sizes(arguments.turns, arguments.requests, arguments.prefix_tokens)
    length = sizes.longest_tokens
    limits = {"max_num_seqs": arguments.requests, "max_model_len": length}
    llm, about = _make_llm(arguments, arguments.requests * arguments.prefix_tokens, **limits)
    with llm:
        results = measure_prefix(llm.engine, sizes=sizes, repeats=arguments.repeats)
    ratio = results["workloads"][1]["computed_prefix_ratio"]
    return {**about, "results": results, "targets": [target("computed_prefix_ratio", ratio, at_most=1.0)]}


def _context(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.bandwidth import BandwidthProbe
    from jaxinfer.bench.context import measure_context

    longest = arguments.contexts[-1]
    llm, about = _make_llm(arguments, longest, max_num_seqs=1, max_model_len=longest + 64)
    with llm:
        results = measure_context(
            llm.engine,
            BandwidthProbe(arguments.probe_bytes),
            contexts=arguments.contexts,
            steps=arguments.steps,
            repeats=arguments.repeats,
        )
    ratio = results["slope_over_floor"]["median"]
    return {**about, "results": results, "targets": [target("slope_over_floor", ratio, at_most=6.0)]}


def _load_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.environment import environment
    from jaxinfer.bench.load_memory import measure_load_memory
    from jaxinfer.checkpoint.hub import resolve_model

    results = measure_load_memory(arguments.model, arguments.dtype)
    about = environment(results["dtype"], resolve_model(arguments.model).source)
    settings = {"model": arguments.model, "dtype": arguments.dtype}
    targets = [target("peak_rss_bytes", results["peak_rss_bytes"], at_most=results["limit_bytes"])]
    return {"environment": about, "settings": settings, "results": results, "targets": targets}


def _invariance(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.environment import environment
    from jaxinfer.bench.invariance import check_invariance
    from jaxinfer.checkpoint.hub import resolve_model
    from jaxinfer.llm import LLM

    settings = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}

    def make(**changed: Any) -> LLM:
        return LLM(arguments.model, dtype=arguments.dtype, verbose=False, **{**settings, **changed})

    found = check_invariance(make)
    about = environment(arguments.dtype, resolve_model(arguments.model).source)
    results = {each.name: "the same bits" if each.same else "OTHER BITS" for each in found}
    same = sum(each.same for each in found)
    targets = [target("circumstances with the same bits", same, at_least=len(found))]
    return {"environment": about, "settings": settings, "results": results, "targets": targets}


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.environment import environment
    from jaxinfer.bench.start import FIRST_LIMIT_S, SECOND_LIMIT_S, measure_start

    results = measure_start(arguments.model, arguments.dtype, arguments.repeats)
    about = environment(results.pop("dtype"), results.pop("source"))
    settings = {"model": arguments.model, "dtype": arguments.dtype, "repeats": arguments.repeats}
    targets = [
        target("first.first_token_s", results["first"]["first_token_s"], at_most=FIRST_LIMIT_S),
        target("second.first_token_s", results["second"]["first_token_s"]["best"], at_most=SECOND_LIMIT_S),
    ]
    return {"environment": about, "settings": settings, "results": results, "targets": targets}


def _fairness(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxinfer.bench.fairness import measure_fairness

    results = measure_fairness(arguments.plot)
    # Half of the rows are the small tenant's share, so twice its time alone, and a row has to become free first.
    targets = [target("over_alone.fair", results["over_alone"]["fair"], at_most=2.5)]
    return {"environment": {}, "settings": {"plot": arguments.plot}, "results": results, "targets": targets}


if __name__ == "__main__":
    raise SystemExit(main())
