"""What a first pass over a file finds."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_RECORD_BYTES = 64 << 20  # of any format: no prompt is longer, and what a file claims is not to be trusted

Start = tuple[int, int | None]


class InputError(ValueError):
    """A file or pattern that cannot be an input; says which and what to do."""


@dataclass(frozen=True)
class FileScan:
    """num_bytes, sha256: of the file as it is stored; `sha256` in hexadecimal.

    num_records: those that cannot be read included.
    starts: index and offset of each record at which reading may begin; the offset is None where the format has none.
    """

    num_bytes: int
    sha256: str
    num_records: int
    starts: list[Start] = field(repr=False)
