"""What a finished job came to, in one file beside its results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxinfer.batch.destination import Destination
from jaxinfer.batch.shard import Done

FILE_NAME = "summary.json"


def write_summary(
    destination: Destination, done: Sequence[Done], fingerprint: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `summary.json`; returns what it holds.

    `run` is of the process that writes it, and all else of the job, whoever worked on it.
    """
    summary = {
        "records": sum(each.num_records for each in done),
        "errors": sum(each.num_errors for each in done),
        "prompt_tokens": sum(each.num_prompt_tokens for each in done),
        "completion_tokens": sum(each.num_output_tokens for each in done),
        "run": dict(run),
        "shards": [asdict(each) for each in done],
        "fingerprint": dict(fingerprint),
    }
    destination.put_bytes(FILE_NAME, json.dumps(summary, indent=1).encode() + b"\n")
    return summary
