"""The compiled shapes of a step, decided in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROWS = 8
"""Fewest tokens and rows of a step: below it XLA's CPU matmuls give a row other bits (docs/performance.md)."""
_CHUNK_TILE_QUERIES = 16


@dataclass(frozen=True)
class Bucket:
    """A compiled shape: T tokens over B rows, with attention in tiles of `tile_queries`."""

    num_tokens: int
    num_rows: int
    tile_queries: int

    def holds(self, query_lens: Sequence[int]) -> bool:
        """Whether a step of these rows fits; a decode bucket takes one token a row."""
        fits = len(query_lens) <= self.num_rows and sum(query_lens) <= self.num_tokens
        return fits and (self.tile_queries > 1 or max(query_lens, default=0) <= 1)


def plan_buckets(max_num_batched_tokens: int, max_num_seqs: int, single_row: bool = False) -> list[Bucket]:
    """Every shape that steps within these limits need, the one that holds any step first.

    Token counts double from one bucket to the next, so less than half of a step is padding. `single_row` adds a decode
    bucket of one row, whose bits differ from the others' (docs/performance.md).
    """
    all_rows = max(MIN_ROWS, -(-max_num_seqs // MIN_ROWS) * MIN_ROWS)
    chunk_sizes = _doubling(32, max(32, max_num_batched_tokens))
    decode_sizes = _doubling(MIN_ROWS, all_rows)
    chunks = [Bucket(size, all_rows, _CHUNK_TILE_QUERIES) for size in chunk_sizes]
    if single_row:
        decode_sizes = [1, *decode_sizes]
    return chunks[::-1] + [Bucket(size, size, 1) for size in decode_sizes]


def choose_bucket(buckets: Sequence[Bucket], query_lens: Sequence[int]) -> Bucket:
    """The smallest bucket that holds these rows; decode buckets before others of their size.

    Raises:
        ValueError: no bucket holds them.
    """
    fitting = [bucket for bucket in buckets if bucket.holds(query_lens)]
    if not fitting:
        raise ValueError(f"a step of {sum(query_lens)} tokens over {len(query_lens)} rows exceeds every bucket")
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows, bucket.tile_queries))


def _doubling(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
