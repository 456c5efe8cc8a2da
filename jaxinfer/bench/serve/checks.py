"""What can be verified about an answer from outside. Every check can fail; a failed one is counted and shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.serve.records import Record

_NUM_EXAMPLES = 3


@dataclass(frozen=True)
class Check:
    """`applies` tells whether it can be made of a record, `holds` whether it was found so, `show` the figures."""

    name: str
    applies: Callable[[Record], bool]
    holds: Callable[[Record], bool]
    show: Callable[[Record], str]


def _usage(record: Record) -> str:
    return f"prompt {record.prompt_tokens}, completion {record.output_tokens}, total {record.total_tokens}"


def _has_usage(record: Record) -> bool:
    return record.ok and record.output_tokens is not None


def make_checks(ignore_eos: bool, accepted_statuses: Collection[int] = ()) -> list[Check]:
    """The checks of a run.

    Args:
        ignore_eos: requests were sent with `ignore_eos`, so each must have as many tokens as it asked for.
        accepted_statuses: HTTP errors that are counted and are no failure, such as 429 under overload.
    """

    def expected(record: Record) -> bool:
        return record.error is not None and record.status in accepted_statuses

    checks = [
        Check("every request was answered", lambda r: not expected(r), lambda r: r.error is None,
              lambda r: f"{r.error}{f': {r.detail}' if r.detail else ''}"),
        Check("the stream ended with [DONE]", lambda r: r.error is None, lambda r: r.done, lambda r: "no [DONE]"),
        Check("a finish_reason came", lambda r: r.error is None, lambda r: r.finish_reason is not None,
              lambda r: f"none after {len(r.text_s)} chunks"),
        Check("usage came", lambda r: r.error is None, lambda r: None not in (r.prompt_tokens, r.output_tokens),
              lambda r: "no usage"),
        Check("prompt and completion tokens add up to the total",
              lambda r: _has_usage(r) and r.total_tokens is not None,
              lambda r: (r.prompt_tokens or 0) + (r.output_tokens or 0) == r.total_tokens, _usage),
        Check("prompt tokens are as many as were sent", lambda r: _has_usage(r) and r.num_prompt_ids is not None,
              lambda r: r.prompt_tokens == r.num_prompt_ids, lambda r: f"{r.prompt_tokens} of {r.num_prompt_ids}"),
        # The last text may come in a chunk of its own, after the tokens.
        Check("no more chunks with text than tokens", _has_usage,
              lambda r: len(r.text_s) <= (r.output_tokens or 0) + 1,
              lambda r: f"{len(r.text_s)} chunks, {r.output_tokens} tokens"),
        Check("tokens with log-probabilities are as many as usage says",
              lambda r: _has_usage(r) and r.counted_tokens is not None, lambda r: r.counted_tokens == r.output_tokens,
              lambda r: f"{r.counted_tokens} counted, {r.output_tokens} in usage"),
        Check("no more tokens than asked for", lambda r: _has_usage(r) and r.requested_tokens is not None,
              lambda r: (r.output_tokens or 0) <= (r.requested_tokens or 0),
              lambda r: f"{r.output_tokens} of {r.requested_tokens}"),
        Check("what ended by length has its length",
              lambda r: _has_usage(r) and r.requested_tokens is not None and r.finish_reason == "length",
              lambda r: (r.output_tokens or 0) >= (r.requested_tokens or 0),
              lambda r: f"{r.output_tokens} of {r.requested_tokens}"),
    ]  # fmt: skip
    if ignore_eos:
        checks.append(
            Check(
                "as many tokens as asked for, since end-of-sequence is ignored",
                lambda r: _has_usage(r) and r.requested_tokens is not None,
                lambda r: r.output_tokens == r.requested_tokens,
                lambda r: f"{r.output_tokens} of {r.requested_tokens}",
            )  # fmt: skip
        )
    return checks


def run_checks(checks: Sequence[Check], records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each: `name`, `num_checked`, `num_failed` and up to three `examples`."""
    rows = []
    for check in checks:
        checked = [record for record in records if check.applies(record)]
        failed = [record for record in checked if not check.holds(record)]
        examples = [f"request {r.session}.{r.turn}: {check.show(r)}" for r in failed[:_NUM_EXAMPLES]]
        rows.append({"name": check.name, "num_checked": len(checked), "num_failed": len(failed), "examples": examples})
    return rows
