"""The plan of a job: its inputs as they were found, cut into shards. Made once, and then the same for every worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import JobError
from jaxinfer.batch.inputs import FileScan, format_of, scan, stamp
from jaxinfer.jobs.durable import write_durably
from jaxinfer.progress import can_show, progress_bar

VERSION = 1
FILE_NAME = "plan.json"


@dataclass(frozen=True)
class Source:
    """An input file as the plan found it. `stamp` is what tells cheaply that it may have changed."""

    path: str
    format: str
    num_bytes: int
    sha256: str
    num_records: int
    stamp: str


@dataclass(frozen=True)
class Shard:
    """Records of one input file, `count` from `first` on; `offset` is where the first begins, where that helps."""

    number: int
    path: str
    format: str
    first: int
    offset: int | None
    count: int


@dataclass(frozen=True)
class Plan:
    """What a job consists of."""

    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]

    @property
    def num_records(self) -> int:
        return sum(shard.count for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Keep it, whole or not at all."""
        content = asdict(self)
        whole = {"version": VERSION, "sha256": _digest(content), **content}
        write_durably(folder / FILE_NAME, json.dumps(whole, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan kept in a folder, or None.

        Raises:
            JobError: it is of another version of this program, or damaged.
        """
        path = folder / FILE_NAME
        try:
            found: dict[str, Any] = dict(json.loads(path.read_bytes()))
            if found.pop("version") != VERSION:
                raise JobError(f"{path} was made by another version of jaxinfer; use that one, or another --state")
            if found.pop("sha256") != _digest(found):
                raise ValueError("its digest does not fit it")
            sources = tuple(Source(**each) for each in found["sources"])
            return cls(sources, tuple(Shard(**each) for each in found["shards"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, JobError):
                raise
            raise JobError(f"{path} is damaged ({error}); restore it, or give another --state") from None


def make_plan(
    paths: Sequence[str], given_format: str | None, records_per_shard: int, limit: int | None, shown: bool = False
) -> Plan:
    """Read the inputs once and cut them into shards of at most `records_per_shard` records; the first `limit` of all.

    `shown` has a bar say how far that is.

    Raises:
        InputError: a file that cannot be read, or whose format is not known.
    """
    sources: list[Source] = []
    shards: list[Shard] = []
    left = limit
    for path in progress_bar(iterable=paths, desc="reading inputs", unit="file", shown=shown and can_show()):
        kind = format_of(path, given_format)
        before = stamp(path)
        found = scan(path, kind, records_per_shard)
        sources.append(Source(path, kind, found.num_bytes, found.sha256, found.num_records, before))
        for shard in _cut(path, kind, found, records_per_shard):
            count = shard.count if left is None else min(left, shard.count)
            if count:
                shards.append(replace(shard, number=len(shards), count=count))
            if left is not None:
                left -= count
    return Plan(tuple(sources), tuple(shards))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _cut(path: str, kind: str, found: FileScan, records_per_shard: int) -> list[Shard]:
    return [
        Shard(0, path, kind, first, offset, min(records_per_shard, found.num_records - first))
        for first, offset in found.starts
    ]


def check_sources(plan: Plan, paths: Sequence[str]) -> None:
    """See that the inputs are those of the plan. A file that may have changed is read again.

    Raises:
        JobError: they are not.
    """
    then = [source.path for source in plan.sources]
    before, now = set(then), set(paths)
    if gone := [path for path in then if path not in now]:
        raise JobError(_changed(f"{gone[0]} was among the inputs"))
    if new := [path for path in paths if path not in before]:
        raise JobError(_changed(f"{new[0]} was not among the inputs"))
    if list(paths) != then:
        raise JobError(_changed("the inputs were in another order"))
    for source in plan.sources:
        same = source.stamp and stamp(source.path) == source.stamp
        if not same and _content(source) != (source.num_bytes, source.sha256):
            raise JobError(_changed(f"{source.path} had other content"))


def _content(source: Source) -> tuple[int, str]:
    found = scan(source.path, source.format, max(1, source.num_records))
    return found.num_bytes, found.sha256


def _changed(what: str) -> str:
    return f"when this job began, {what}: give what it began with, or begin another with a new --output and --state"
