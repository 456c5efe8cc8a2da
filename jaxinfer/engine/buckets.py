"""The compiled shapes of a step, decided in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

MIN_ROWS = 8
"""Fewest tokens and rows of a step: below it XLA's CPU matmuls give a row other bits (docs/performance.md)."""
_CHUNK_TILE_QUERIES = 16
_SIZE_STEP = 8
MIN_CHUNK_TOKENS = 32
"""Fewest tokens of a step that has chunks."""
_MAX_CANDIDATES = 128


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


def plan_buckets(
    max_num_batched_tokens: int, max_num_seqs: int, single_row: bool = False, num_programs: int | None = None
) -> list[Bucket]:
    """Every shape that steps within these limits need, the one that holds any step first.

    The sizes are those of the least padding for their number (`plan_sizes`), and the number is shared between decode
    steps and steps with chunks so that the sum of the two shares of padding is least. `single_row` adds a decode bucket
    of one row, whose bits differ from the others' (docs/performance.md).

    Args:
        num_programs: buckets in all, the one of a single row not counted; at least 2. None takes as many as doubling
            from the smallest size to the limit would.

    Raises:
        ValueError: fewer than two programs.
    """
    all_rows = _round_up(max_num_seqs, _SIZE_STEP)
    most_tokens = max(MIN_CHUNK_TOKENS, _round_up(max_num_batched_tokens, _SIZE_STEP))
    if num_programs is None:
        num_programs = _num_doublings(MIN_CHUNK_TOKENS, most_tokens) + _num_doublings(MIN_ROWS, all_rows)
    if num_programs < 2:
        raise ValueError(f"num_programs={num_programs} must be at least 2: one with chunks and one for decode steps")

    most = num_programs - 1
    chunk_plans, decode_plans = _plans(MIN_CHUNK_TOKENS, most_tokens, most), _plans(MIN_ROWS, all_rows, most)
    chunk_sizes, decode_sizes = min(
        zip(chunk_plans, reversed(decode_plans), strict=True),
        key=lambda sizes: sum(expected_waste(each) for each in sizes),
    )
    if single_row:
        decode_sizes = (1, *decode_sizes)
    chunks = [Bucket(size, all_rows, _CHUNK_TILE_QUERIES) for size in reversed(chunk_sizes)]
    return chunks + [Bucket(size, size, 1) for size in decode_sizes]


def plan_sizes(first: int, last: int, num_sizes: int) -> tuple[int, ...]:
    """At most `num_sizes` sizes from `first` up to `last`, the last among them, with the least expected padding.

    The load they are made for: a step has n of 1 … last tokens with a probability in proportion to 1/n, so that every
    octave is equally frequent, and runs in the smallest size that holds it. Padding over all tokens is then
    1 - E[n] / E[size], least where E[size] is, and

        cost[k][j] = min over i < j of  cost[k-1][i] + P(size i < n <= size j) · size j

    is the least part of E[size] that steps of up to size j have with k sizes. Candidates are multiples of 8, thinned
    evenly beyond 128 of them.
    """
    return _plans(first, last, num_sizes)[-1]


@cache
def _plans(first: int, last: int, most: int) -> list[tuple[int, ...]]:
    """`plan_sizes` for each number of sizes from 1 to `most`."""
    stride = _SIZE_STEP * max(1, -(-(last - first) // (_SIZE_STEP * _MAX_CANDIDATES)))
    sizes = [*range(first, last, stride), last]
    upto = [_load(last)[size] for size in sizes]
    best: list[tuple[float, tuple[int, ...]]] = [(upto[j] * size, (size,)) for j, size in enumerate(sizes)]
    plans: list[tuple[int, ...]] = [best[-1][1]]
    for _ in range(1, most):
        best = [
            min([best[j], *((best[i][0] + (upto[j] - upto[i]) * size, (*best[i][1], size)) for i in range(j))])
            for j, size in enumerate(sizes)
        ]
        plans.append(best[-1][1])
    return plans


def expected_waste(sizes: Sequence[int]) -> float:
    """The share of padding, 0 up to 1, of these rising sizes under the load that `plan_sizes` is made for."""
    upto = _load(sizes[-1])
    ends = [0.0, *(upto[size] for size in sizes)]
    mean_size = sum(size * (end - start) for size, start, end in zip(sizes, ends, ends[1:], strict=False))
    # n · 1/n sums to the number of step lengths.
    return 1 - sizes[-1] / mean_size


@cache
def _load(last: int) -> list[float]:
    """For each n up to `last`, the (unscaled) probability of a step of at most n tokens."""
    return [0.0, *accumulate(1 / n for n in range(1, last + 1))]


def choose_bucket(buckets: Sequence[Bucket], query_lens: Sequence[int]) -> Bucket:
    """The smallest bucket that holds these rows; decode buckets before others of their size.

    Raises:
        ValueError: no bucket holds them.
    """
    fitting = [bucket for bucket in buckets if bucket.holds(query_lens)]
    if not fitting:
        raise ValueError(f"a step of {sum(query_lens)} tokens over {len(query_lens)} rows exceeds every bucket")
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows, bucket.tile_queries))


def _round_up(count: int, step: int) -> int:
    return max(step, -(-count // step) * step)


def _num_doublings(first: int, last: int) -> int:
    """Sizes from `first` to `last` when each is twice the one before, or `last`."""
    return 1 + max(0, -(-last // first) - 1).bit_length()
