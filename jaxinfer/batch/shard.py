"""One shard while it is worked on: who has it, what of it is done, and its way to the finished files.

STATE/shards/00007/lock        held by the worker that has the shard; let go by its end, however it ends
STATE/shards/00007/journal     results in the order in which they came, synced
STATE/shards/00007/done.json   the shard's files are in their place; its journal is gone then
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.batch.destination import Destination
from jaxinfer.batch.errors import JobError
from jaxinfer.batch.outputs import SUFFIXES, write_results
from jaxinfer.batch.plan import Shard
from jaxinfer.batch.records import Result
from jaxinfer.jobs.durable import FolderInUseError, FolderLock, sync_folder, write_durably
from jaxinfer.jobs.journal import Journal, JournalError
from jaxinfer.jobs.results import Committed


@dataclass(frozen=True)
class Done:
    """What a finished shard came to: its files and what they hold."""

    source: str
    first: int
    num_records: int
    num_errors: int
    num_prompt_tokens: int
    num_output_tokens: int
    results: str
    num_bytes: int
    sha256: str
    errors: str | None


@dataclass(frozen=True)
class Naming:
    """How a job's files are named and written, and where errors go: `errors_too` has results hold them as well."""

    destination: Destination
    format: str
    num_shards: int
    errors_too: bool

    def results(self, number: int) -> str:
        return f"results-{number:05d}-of-{self.num_shards:05d}{SUFFIXES[self.format]}"

    def errors(self, number: int) -> str:
        return f"errors-{number:05d}-of-{self.num_shards:05d}.jsonl"


def shard_folder(state: Path, number: int) -> Path:
    return state / "shards" / f"{number:05d}"


def drop_journal(folder: Path) -> None:
    """Remove the journal of a shard that is finished, if a crash or a race has left one."""
    if (folder / "journal").exists():
        (folder / "journal").unlink(missing_ok=True)
        sync_folder(folder)


class OpenShard:
    """A shard that this process has. Results are committed in any order, by one thread at a time.

    Raises:
        FolderInUseError: another process has it.
        JobError: its journal is damaged.
    """

    def __init__(self, state: Path, shard: Shard):
        self.shard = shard
        self.folder = shard_folder(state, shard.number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        self.is_closed = False
        self._num_errors = self._num_prompt_tokens = self._num_output_tokens = 0
        try:
            path = self.folder / "journal"
            self._journal = Journal(path)
            try:
                self._committed = Committed(path, shard.count, on_record=lambda record: self._count(record["result"]))
            except BaseException:
                self._journal.close()
                raise
        except JournalError as error:
            self._lock.close()
            raise JobError(f"{error}, or remove it: the records of this shard are then run again") from None
        except BaseException:
            self._lock.close()
            raise

    def has(self, index: int) -> bool:
        """Whether the record of this index in its file has a result."""
        return index - self.shard.first in self._committed

    @property
    def num_committed(self) -> int:
        return len(self._committed)

    @property
    def is_complete(self) -> bool:
        return len(self._committed) == self.shard.count

    def commit(self, results: Sequence[Result]) -> None:
        """Returns when the results are on the disk.

        Raises:
            OSError: they could not be written.
        """
        records = [{"index": result.index - self.shard.first, "result": result.as_json()} for result in results]
        place = self._journal.append(records)
        for record in records:
            if self._committed.add(record["index"], place):
                self._count(record["result"])

    def _count(self, result: dict[str, Any]) -> None:
        """Note what a result, as JSON, adds to the shard's sums."""
        self._num_errors += result["error"] is not None
        self._num_prompt_tokens += result["num_prompt_tokens"]
        self._num_output_tokens += result["num_output_tokens"]

    def finish(self, naming: Naming) -> Done:
        """Write the shard's files, in the order of the input, and let its journal go.

        Raises:
            OSError: they could not be written; nothing is lost.
        """
        number, destination = self.shard.number, naming.destination
        name, errors_name = naming.results(number), naming.errors(number)
        num_bytes, sha256 = 0, ""

        def write(path: Path) -> None:
            nonlocal num_bytes, sha256
            from_examples = self.shard.format == "tfrecord"
            write_results(naming.format, path, lambda: self._results(naming.errors_too), from_examples=from_examples)
            with open(path, "rb") as file:
                sha256, num_bytes = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size

        destination.put(name, write)
        if self._num_errors:
            destination.put(errors_name, self._write_errors)
        else:
            destination.remove(errors_name)
        done = Done(
            source=self.shard.path,
            first=self.shard.first,
            num_records=self.shard.count,
            num_errors=self._num_errors,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            results=name,
            num_bytes=num_bytes,
            sha256=sha256,
            errors=errors_name if self._num_errors else None,
        )
        write_durably(self.folder / "done.json", json.dumps(asdict(done), indent=1).encode())
        self._journal.close()
        drop_journal(self.folder)
        return done

    def _write_errors(self, path: Path) -> None:
        with open(path, "wb") as file:
            for result in self._results(True):
                if result.error is not None:
                    told = {"source_file": result.file, "source_index": result.index, "error": result.error}
                    file.write(json.dumps(told, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _results(self, errors_too: bool) -> Iterator[Result]:
        for number in range(self.shard.count):
            result = Result.from_json(self._committed.read(number)["result"])
            if errors_too or result.error is None:
                yield result

    def close(self) -> None:
        """Let others have it."""
        self._journal.close()
        self._lock.close()
        self.is_closed = True


def read_done(state: Path, shard: Shard) -> Done | None:
    """What a shard came to, or None where it is not finished."""
    path = shard_folder(state, shard.number) / "done.json"
    try:
        return Done(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise JobError(
            f"{path} is damaged ({error}); remove it: the records of this shard are then run again"
        ) from None


class Leases:
    """The shards of a job that this process may take, one after the other. A shard that a worker left is taken up."""

    def __init__(self, state: Path, shards: Sequence[Shard], destination: Destination):
        self._state = state
        self._shards = shards
        self._destination = destination
        self._finished: set[int] = set()  # so that a store is asked once

    def take(self) -> OpenShard | None:
        """The first shard that is neither finished nor another worker's; None where there is none."""
        for shard in self._shards:
            if self._is_finished(shard):
                continue
            try:
                taken = OpenShard(self._state, shard)
            except FolderInUseError:
                continue
            if not self._is_finished(shard):  # not before it was taken, at last
                return taken
            taken.close()
        return None

    @property
    def num_unfinished(self) -> int:
        return sum(not self._is_finished(shard) for shard in self._shards)

    def _is_finished(self, shard: Shard) -> bool:
        """A shard whose results were removed is not."""
        if shard.number not in self._finished:
            done = read_done(self._state, shard)
            if done is None or self._destination.num_bytes(done.results) != done.num_bytes:
                return False
            if done.errors is not None and self._destination.num_bytes(done.errors) is None:
                return False
            self._finished.add(shard.number)
        return True
