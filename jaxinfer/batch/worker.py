"""The work on a job's shards: records into the engine, results out of it. Knows neither files nor their formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxinfer.batch.committer import Committer
from jaxinfer.batch.errors import JobError
from jaxinfer.batch.feed import Feed, Item
from jaxinfer.batch.records import Choice, Result
from jaxinfer.request import CompletionOutput, Logprob, RequestOutput, SamplingParams


@runtime_checkable
class Runs(Protocol):
    """What runs requests: `jaxinfer.engine.engine.Engine`, or a stand-in for it."""

    def add(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[tuple[RequestOutput, list[str]]]: ...


class Worker:
    """Runs what a feed gives until it ends.

    Args:
        engine: has nothing else to do meanwhile.
        max_rows: choices that are in the engine, or on their way from it to the disk, at once: enough that it can
            choose among them, and no more, since those are what a crash has run again.
        fingerprint: what results carry.
        fail_on_error, fail_on_long_prompt: raise for a record that cannot be run, rather than record the reason.
    """

    def __init__(
        self,
        engine: Runs,
        max_rows: int,
        fingerprint: str,
        fail_on_error: bool,
        fail_on_long_prompt: bool,
    ):
        self._engine = engine
        self._max_rows = max_rows
        self._fingerprint = fingerprint
        self._fail_on_error = fail_on_error
        self._fail_on_long_prompt = fail_on_long_prompt

    def run(self, feed: Feed, committer: Committer, check: Callable[[], None]) -> None:
        """Until the feed has ended and all it gave has a result. `check` is called between steps, and may raise.

        Raises:
            JobError: a record that cannot be run, where that fails the job; what has been committed stays.
        """
        running: dict[str, Item] = {}
        num_rows = 0
        try:
            while True:
                # Those that wait for the disk count: a crash has them run again too.
                while num_rows + committer.num_waiting < self._max_rows:
                    if (item := feed.take(wait=not running)) is None:
                        break
                    request_id = f"{item.shard.shard.number}/{item.record.index}"
                    reason = self._add(request_id, item)
                    if reason is None and item.ask is not None:
                        running[request_id] = item
                        num_rows += item.ask.params.num_choices
                    else:
                        committer.put(item.shard, self._refused(item, str(reason)))
                    check()
                if not running and feed.ended:
                    return
                for output, _ in self._engine.step() if running else ():
                    if output.finished:
                        item = running.pop(output.request_id)
                        num_rows -= item.ask.params.num_choices if item.ask is not None else 0
                        committer.put(item.shard, self._result(item, output))
                if not running:
                    committer.wait()
                committer.check()
                check()
        finally:
            for request_id in running:
                self._engine.abort(request_id)

    def _add(self, request_id: str, item: Item) -> str | None:
        """Give a record to the engine, or say why that cannot be."""
        if item.ask is None:
            return item.error
        try:
            self._engine.add(request_id, item.ask.prompt_ids, item.ask.params)
        except ValueError as error:
            return str(error)
        return None

    def _refused(self, item: Item, reason: str) -> Result:
        told = f"{item.place}: {reason}"
        if self._fail_on_long_prompt if item.is_too_long else self._fail_on_error:
            remedy = "--on-long-prompt skip or truncate-left" if item.is_too_long else "--on-error skip or record"
            raise JobError(
                f"{told}\nWhat is done is kept: go on with {remedy}; or mend it, and begin again with another --output "
                "and --state"
            )
        path, index = item.shard.shard.path, item.record.index
        return Result(path, index, self._fingerprint, features=item.features, error=told)

    def _result(self, item: Item, output: RequestOutput) -> Result:
        if failed := [choice for choice in output.outputs if choice.finish_reason == "error"]:
            return self._refused(item, str(failed[0].stop_reason))
        assert item.ask is not None
        params, scored = item.ask.params, output.prompt_logprobs
        return Result(
            item.shard.shard.path,
            item.record.index,
            self._fingerprint,
            len(output.prompt_token_ids),
            output.num_generated_tokens,
            tuple(_choice(choice, params.logprobs) for choice in output.outputs),
            None if scored is None else _of_prompt(scored, output.prompt_token_ids),
            None if scored is None else _tops(scored, params.prompt_logprobs),
            item.features,
        )


def _choice(choice: CompletionOutput, num_top: int | None) -> Choice:
    places = choice.logprobs
    return Choice(
        choice.text,
        choice.token_ids,
        str(choice.finish_reason),
        choice.stop_reason,
        choice.cumulative_logprob,
        None
        if places is None
        else [place[token].logprob for place, token in zip(places, choice.token_ids, strict=True)],
        None if places is None else _tops(places, num_top),
    )


def _of_prompt(places: list[dict[int, Logprob] | None], ids: list[int]) -> list[float | None]:
    return [None if place is None else place[token].logprob for place, token in zip(places, ids, strict=True)]


def _tops(places: Sequence[dict[int, Logprob] | None], num_top: int | None) -> list[Any] | None:
    """The likeliest tokens at each place; None where only those that stand there were asked for."""
    return [None if place is None else _top(place, num_top) for place in places] if num_top else None


def _top(place: dict[int, Logprob], num_top: int) -> list[tuple[int, float]]:
    likeliest = sorted(place.items(), key=lambda each: each[1].rank)[:num_top]
    return [(token, found.logprob) for token, found in likeliest]
