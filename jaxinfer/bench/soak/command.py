"""The command `python -m jaxinfer.bench soak`: its arguments, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from jaxinfer.bench.environment import client_environment
from jaxinfer.bench.serve.client import import_aiohttp, normalize_url
from jaxinfer.bench.serve.server import ChildServer, ended_by_signals
from jaxinfer.bench.soak.client import Clients
from jaxinfer.bench.soak.run import Plan, Soak, learn
from jaxinfer.bench.soak.watch import TOLERATED_BYTES, TOLERATED_SHARE

NUM_ROWS, NUM_WAITING = 8, 24
SERVER_FLAGS = [
    *("--max-num-seqs", str(NUM_ROWS), "--max-queue-len", str(NUM_WAITING)),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128"),
    *("--num-pages", "160"),  # fewer than the rows can fill: some give theirs up, and the cache of prefixes is short
    *("--stream-timeout", "3", "--drain-timeout", "150", "--batch-invariant", "--batch-dir", "none"),
]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `soak`."""
    command.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of load (default: 10)")
    command.add_argument("--concurrency", type=int, default=16, metavar="N", help="clients at once (default: 16)")
    command.add_argument("--seed", type=int, default=0, help="of the requests")
    command.add_argument("--only", type=_numbers, metavar="N,N,…", help="send these requests of the seed again")
    command.add_argument("--base-url", metavar="URL", help="of a running server of this package (default: start one)")
    command.add_argument("--api-key", metavar="KEY")
    command.add_argument("--model", help="what the server that is started here serves (default: SmolLM2-135M)")
    command.add_argument("--server-args", default="", metavar="FLAGS", help="further flags of that server")
    command.set_defaults(run=run, as_text=as_text)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of requests with commas between")
    return [int(part) for part in parts]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Soak a server as the arguments say; `exit_code` is 1 where a check failed.

    Raises:
        ValueError: arguments that make no sense, or a package that is missing.
        RuntimeError: the server cannot be reached or started, or is none of this package's.
    """
    if arguments.minutes <= 0 or arguments.concurrency < 1:
        raise ValueError("--minutes must be above 0, and --concurrency 1 or more")
    if arguments.base_url is not None and (arguments.model is not None or arguments.server_args):
        raise ValueError("--model and --server-args are for a server that is started here, not for that of --base-url")
    import_aiohttp()
    load = os.getloadavg()[0]
    plan = Plan(arguments.minutes * 60, arguments.concurrency, arguments.seed, arguments.only)
    url = arguments.base_url
    with ended_by_signals():
        if url is not None:
            normalize_url(url)
            model, results = asyncio.run(soak(url, plan, api_key=arguments.api_key))
        else:
            flags = [] if arguments.model is None else ["--model", arguments.model]
            with ChildServer([*flags, *SERVER_FLAGS, *shlex.split(arguments.server_args)]) as child:
                child.wait_until_idle()
                model, results = asyncio.run(soak(child.base_url, plan, child))
    return _report(arguments, load, url or "our own", model, results)


async def soak(
    url: str, plan: Plan, child: ChildServer | None = None, *, api_key: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The model's name and the results. A `child` is watched and ended; it holds what `SERVER_FLAGS` say.

    Raises:
        RuntimeError: see `run`.
    """
    async with Clients(url, api_key) as clients:
        world = await learn(clients, None if child is None else NUM_ROWS + NUM_WAITING, plan.seed)
        return world.model, await Soak(clients, world, plan, child).run()


def _report(
    arguments: argparse.Namespace, load: float, server: str, model: str, results: dict[str, Any]
) -> dict[str, Any]:
    about = client_environment(server, model, load)
    shown = ("minutes", "concurrency", "seed", "only", "server_args")
    settings = {name: getattr(arguments, name) for name in shown if getattr(arguments, name) not in (None, "")}
    settings["tolerated growth"] = f"{TOLERATED_BYTES >> 20} MiB + {TOLERATED_SHARE:.0%}"
    failed = any(check["num_failed"] for check in results["checks"])
    return {"environment": about, "settings": settings, "results": results, "targets": [], "exit_code": int(failed)}


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    results = report["results"]
    lines = [f"{name:<12} {value}" for name, value in report["environment"].items()]
    lines.append("settings     " + ", ".join(f"{name}={value}" for name, value in report["settings"].items()))
    lines += ["", f"{results['num_requests']} requests in {results['duration_s']:.0f} s"]
    for name in ("kinds", "results", "engine", "process"):
        told = ", ".join(f"{key} {_shown(value)}" for key, value in results.get(name, {}).items())
        lines.append(f"{name:<12} {told}")
    lines += ["", "checks"]
    for check in results["checks"]:
        verdict = "ok" if not check["num_failed"] else f"{check['num_failed']} FAILED"
        lines.append(f"  {check['name']}: {check['num_checked']} checked, {verdict}")
        for fault in check["faults"]:
            lines.append(f"    {fault['what']}")
            if "request" in fault:
                lines.append(f"      of {json.dumps(fault['request'])[:600]}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return " → ".join(map(str, value)) if isinstance(value, list) else str(value)
