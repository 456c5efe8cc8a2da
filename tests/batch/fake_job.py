"""The batch command with a stand-in for the model, in a process that a test may end at any moment."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.batch import committer, estimate, job, model  # noqa: F401 (loaded before the process is forked)
from jaxinfer.batch.__main__ import main
from jaxinfer.batch.config import JobConfig, settings_of
from jaxinfer.batch.fingerprint import Fingerprint
from jaxinfer.batch.inputs import jsonl, tfrecord  # noqa: F401
from jaxinfer.batch.model import Model
from jaxinfer.batch.outputs import RESERVED
from jaxinfer.batch.outputs import tfrecord as tfrecords  # noqa: F401
from jaxinfer.batch.requests import Requests
from jaxinfer.batch.stand_in import StandIn
from jaxinfer.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama")
VOCAB_SIZE = 288
DURABLE = ("fsync", "replace", "unlink", "ftruncate")
"""Calls of `os` that a crash may come before or after."""
ENVIRONMENT = {"jax": "1.0", "processor": "fast"}
MODEL = {"parameters": "a" * 64, "attention": "xla"}


@contextlib.contextmanager
def open_fake(
    config: JobConfig,
    ran: Path | None = None,
    step_s: float | int = 0.0,
    of_model: Mapping[str, str] = MODEL,
    environment: Mapping[str, str] = ENVIRONMENT,
    **settings: Any,
) -> Iterator[Model]:
    """What `open_llm` gives, without a model. The engine notes each request in `ran`, a line each, as it comes."""
    engine: Any = StandIn(**settings)
    notes = None if ran is None else os.open(ran, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if notes is not None:
        engine.add = partial(_noted, engine.add, notes)
    if step_s:
        engine.step = partial(_slowly, engine.step, step_s)
    requests = Requests(config, TOKENIZER, {}, engine.max_model_len, VOCAB_SIZE, RESERVED)
    try:
        yield Model(engine, requests, Fingerprint(settings_of(config), of_model, environment), 2 * engine.num_rows)
    finally:
        if notes is not None:
            os.close(notes)


def _noted(add: Callable[..., None], file: int, request_id: str, *request: Any) -> None:
    add(request_id, *request)
    os.write(file, f"{request_id}\n".encode())


def _slowly(step: Callable[[], Any], step_s: float | int) -> Any:
    time.sleep(step_s)
    return step()


def crash_at(number: int, after: bool = False, full: bool = False) -> Callable[[], int]:
    """End the process, as by kill -9, before or after the durable call of this number; or have no space left from that
    call on. Returns what counts them."""
    count = 0

    def counted(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if full:
            if 0 < number <= count and call is not unlink:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif count == number and not after:
            os._exit(9)
        result = call(*values, **named)
        if count == number and not full:
            os._exit(9)
        return result

    unlink = os.unlink
    for name in DURABLE:
        setattr(os, name, partial(counted, getattr(os, name)))
    return lambda: count


def run(
    argv: Sequence[str],
    folder: Path,
    crash: int = 0,
    after: bool = False,
    full: bool = False,
    ignored: Sequence[int] = (),
    most_bytes: int = resource.RLIM_INFINITY,
    plan_s: float | int = 0.0,
    **settings: Any,
) -> None:
    """Be that command. FOLDER/said has what it says, FOLDER/ran its requests, FOLDER/calls its durable calls.

    ignored: signals. most_bytes: of a file. plan_s: what planning takes besides.
    """
    said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    if plan_s:
        plan = job.make_plan

        def plan_slowly(*what: Any) -> Any:
            (folder / "planning").touch()
            time.sleep(plan_s)
            return plan(*what)

        job.make_plan = plan_slowly
    counted = crash_at(crash, after, full)
    code = main(argv, partial(open_fake, **{"ran": folder / "ran", **settings}))
    (folder / "calls").write_text(str(counted()))
    sys.exit(code)
