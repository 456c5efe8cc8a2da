"""What a job would take: its records counted, and a sample of them run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

from jaxinfer.batch.config import JobConfig
from jaxinfer.batch.inputs import expand, read
from jaxinfer.batch.model import Engine, Model
from jaxinfer.batch.plan import Plan, make_plan
from jaxinfer.batch.records import InputRecord
from jaxinfer.batch.requests import Ask, LongPromptError, RecordError

SAMPLE = 256
"""Prompts that are encoded, spread over the job."""

MAX_RUN_S = 60.0
"""No more of the sample is begun after this long."""


@dataclass(frozen=True)
class Lengths:
    """Of a sample, in tokens."""

    mean: float | int
    median: float | int
    p95: float | int
    most: int

    @classmethod
    def of(cls, found: Sequence[int]) -> Lengths:
        ordered = sorted(found)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        return cls(statistics.mean(ordered), statistics.median(ordered), p95, ordered[-1])

    def __str__(self) -> str:
        return f"mean {self.mean:,.0f}, median {self.median:,.0f}, 95% up to {self.p95:,.0f}, most {self.most:,}"


def estimate(config: JobConfig, open_model: Callable[[JobConfig], AbstractContextManager[Model]]) -> str:
    """Counts, lengths, tokens and time, for a person to read. Writes nothing.

    Raises:
        JobError, InputError, OSError: as the job would.
    """
    paths = expand(config.inputs)
    plan = make_plan(paths, config.input_format, config.records_per_shard, config.limit, not config.quiet)
    lines = [f"files: {len(plan.sources):,}, records: {plan.num_records:,}, shards of results: {len(plan.shards):,}"]
    if not plan.num_records:
        return lines[0]
    with open_model(config) as model:
        asks, long, wrong = _sampled(plan, model)
        num_sampled = len(asks) + len(long) + len(wrong)
        share = plan.num_records / num_sampled
        lines.append(f"sample: {num_sampled} records spread over them")
        for name, found in (("too long", long), ("not to be run", wrong)):
            if found:
                lines.append(f"{name}: {len(found)} of the sample, so about {len(found) * share:,.0f}: {found[0]}")
        if not asks:
            return "\n".join(lines)
        model.wait_until_compiled()
        prompts = Lengths.of([len(ask.prompt_ids) for _, ask in asks])
        outputs, elapsed_s, refused = _run(asks, model.engine, model.max_rows)
    num_run = len(outputs)
    if refused:
        lines.append(f"refused: {len(refused)} of {len(refused) + num_run} that were run: {refused[0]}")
    if not outputs:
        return "\n".join(lines)
    num_records = len(asks) * share * num_run / (num_run + len(refused))
    seconds = elapsed_s * num_records / num_run
    total = statistics.mean(outputs) * num_records
    lines += [
        f"prompts: {prompts} tokens; in all about {prompts.mean * num_records:,.0f}",
        f"outputs: {Lengths.of(outputs)} tokens ({num_run} run); in all about {total:,.0f}",
        f"speed: {sum(outputs) / elapsed_s:,.0f} output tokens/s, {num_run / elapsed_s:,.2f} records/s",
        f"time: about {timedelta(seconds=round(seconds))} by one worker on this machine ({seconds / 3600:,.2f} hours)",
    ]
    return "\n".join(lines)


def _sampled(plan: Plan, model: Model) -> tuple[list[tuple[str, Ask]], list[str], list[str]]:
    """The requests of a sample with their places; why others of it are too long, or cannot be run."""
    asks: list[tuple[str, Ask]] = []
    long: list[str] = []
    wrong: list[str] = []
    for path, record in _spread(plan):
        place = f"{path}, record {record.index}"
        try:
            if record.error is not None:
                raise RecordError(record.error)
            asks.append((place, model.requests.make(path, record)))
        except RecordError as error:
            (long if isinstance(error, LongPromptError) else wrong).append(f"{place}: {error}")
    return asks, long, wrong


def _spread(plan: Plan) -> Iterator[tuple[str, InputRecord]]:
    """Every so many records, of all shards."""
    num_sampled = min(SAMPLE, plan.num_records)
    sampled = {number * plan.num_records // num_sampled for number in range(num_sampled)}
    number = 0
    for shard in plan.shards:
        for record in read(shard.path, shard.format, (shard.first, shard.offset), shard.count):
            if number in sampled:
                yield shard.path, record
            number += 1


def _run(asks: Sequence[tuple[str, Ask]], engine: Engine, max_rows: int) -> tuple[list[int], float, list[str]]:
    """Output tokens of each request that was run, the seconds that took, and why others were refused."""
    waiting = list(asks[:: max(1, len(asks) // max_rows)])[::-1]
    outputs: list[int] = []
    refused: list[str] = []
    begin_s = time.monotonic()
    running = 0
    while waiting or running:
        while waiting and running < max_rows:
            if outputs and time.monotonic() - begin_s > MAX_RUN_S:
                waiting.clear()
                break
            place, ask = waiting.pop()
            try:
                engine.add(place, ask.prompt_ids, ask.params)
                running += 1
            except ValueError as error:
                refused.append(f"{place}: {error}")
        for output, _ in engine.step() if running else ():
            if output.finished:
                outputs.append(output.num_generated_tokens)
                running -= 1
    return outputs, max(time.monotonic() - begin_s, 1e-9), refused
