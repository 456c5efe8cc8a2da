"""From rows on the host to the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.steps import StepInputs


@dataclass(frozen=True)
class Row:
    """What one sequence does in a step: `tokens` are the last of its `context_len` positions, kept in `pages`."""

    tokens: Sequence[int]
    context_len: int
    pages: Sequence[int]


def build(rows: Sequence[Row], bucket: Bucket, table_width: int, num_lanes: int = 0) -> StepInputs:
    """Pad rows to a bucket. The row's last token is the one whose logits are wanted: logit row b belongs to row b.

    `last_token` is of `num_lanes` lanes and the padding lane, all 0.
    """
    tokens = np.zeros(bucket.num_tokens, np.int32)
    query_start = np.zeros(bucket.num_rows + 1, np.int32)
    context_lens = np.zeros(bucket.num_rows, np.int32)
    page_table = np.zeros((bucket.num_rows, table_width), np.int32)
    logit_rows = np.zeros(bucket.num_rows, np.int32)
    used = 0
    for index, row in enumerate(rows):
        tokens[used : used + len(row.tokens)] = row.tokens
        used += len(row.tokens)
        query_start[index + 1] = used
        context_lens[index] = row.context_len
        page_table[index, : len(row.pages)] = row.pages
        logit_rows[index] = used - 1
    query_start[len(rows) + 1 :] = used
    last_token = np.zeros(num_lanes + 1, np.int32)
    return StepInputs(tokens, query_start, context_lens, page_table, logit_rows, last_token)
