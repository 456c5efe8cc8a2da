"""A measurement in a process of its own: a module that is run with its arguments as JSON and prints its result so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

_REFUSED = 3


def run_child(name: str, module: str, arguments: list[Any], environment: Mapping[str, str] | None = None) -> Any:
    """Run `module`, which ends with `serve_child`, on these arguments; returns what it measured.

    Raises:
        ValueError: it refused its arguments; the message is its own.
        RuntimeError: the process failed otherwise; the message begins with `name`.
    """
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == _REFUSED:
        raise ValueError(reason)
    raise RuntimeError(f"{name} ended with {done.returncode}: {reason}")


def serve_child(measure: Callable[..., Any]) -> None:
    """The other side: measure, and print the result as the last line, or a refusal to stderr."""
    try:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(_REFUSED) from None
