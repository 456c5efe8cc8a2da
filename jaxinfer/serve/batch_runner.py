"""One batch's way from its input file to its output files. It may be cut off anywhere and begun again."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from jaxinfer.jobs.journal import Journal, JournalError
from jaxinfer.jobs.records import Line, Record, RecordError, parse, read_lines
from jaxinfer.jobs.results import Committed
from jaxinfer.serve.batch_results import Committer, Result, told, write_out
from jaxinfer.serve.batch_state import Batch, Status
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.file_store import FileStore
from jaxinfer.serve.offline import Places, ask

logger = logging.getLogger("jaxinfer.serve")

MAX_REQUESTS = 50_000
MAX_TRIES = 3
_TRY_AGAIN_S = 1.0
_UNDONE = {
    "expired": "the batch's completion window ended before this request was run",
    "cancelled": "the batch was cancelled before this request was done",
}


class EngineGoneError(Exception):
    """The engine cannot go on; the batch can, in another process."""


class BatchFailedError(Exception):
    """What keeps the whole batch from going on, in words for its owner."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Surroundings:
    """What batches of a server share. `app` has the endpoints."""

    app: ASGIApp
    store: FileStore
    places: Places
    max_line_bytes: int


class BatchRunner:
    """Runs a batch, whose state and journal are in `folder`."""

    def __init__(self, batch: Batch, folder: Path, around: Surroundings):
        self.batch = batch
        self.folder = folder
        self._around = around
        self._source = around.store.path(batch.input_file_id)
        self._journal_path = folder / "journal"
        self._cancelled = asyncio.Event()
        self._num_counted_bytes = 0

    async def cancel(self) -> None:
        """Have it end with what it has."""
        if self.batch.status in ("validating", "in_progress"):
            self.batch.enter("cancelling")
            await self._save()
            self._cancelled.set()

    async def run(self) -> None:
        """Until the batch has ended. Cancelled, it can be begun again, here or in another process."""
        batch = self.batch
        try:
            if batch.status in ("validating", "in_progress"):
                batch.outcome = await self._until_done()
            elif batch.status == "cancelling":
                batch.outcome = "cancelled"
        except BatchFailedError as error:
            batch.errors = [{"code": error.code, "message": str(error), "line": None, "param": None}]
            batch.outcome = "failed"
        except EngineGoneError:
            logger.error("%s stops, since the engine has failed; it goes on after a restart", batch.id)
            return
        await self._write_out()

    async def _until_done(self) -> Status:
        """Answer the lines, unless the batch is cancelled or expires before."""
        work = asyncio.create_task(self._answer_all())
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            left_s = max(0.0, self.batch.expires_at - time.time())
            await asyncio.wait({work, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "completed"
            return "cancelled" if self._cancelled.is_set() else "expired"
        finally:
            work.cancel()
            cancelled.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _answer_all(self) -> None:
        batch = self.batch
        num_requests, repeated = await asyncio.to_thread(_scan, self._source, self._around.max_line_bytes)
        if not num_requests:
            raise BatchFailedError("empty_file", "the input file has no requests")
        if num_requests > MAX_REQUESTS:
            raise BatchFailedError(
                "too_many_requests", f"the input file has {num_requests} requests and {MAX_REQUESTS} are the most"
            )
        try:
            done, num_good = await asyncio.to_thread(_committed, self._journal_path, num_requests)
            journal = await _opened(self._journal_path)
        except JournalError as error:
            logger.error("%s: %s", batch.id, error)
            raise BatchFailedError("storage_error", "the journal of the results is damaged") from None
        try:
            batch.num_requests = num_requests
            batch.num_completed, batch.num_failed = num_good, len(done) - num_good
            if batch.status == "validating":
                batch.enter("in_progress")
                await self._save()
            self._count_journal(journal.num_bytes)
            committer = Committer(journal)
            async with asyncio.TaskGroup() as group:
                for index, line in enumerate(read_lines(self._source, self._around.max_line_bytes)):
                    if index in done:
                        continue
                    await self._around.places.take()
                    task = group.create_task(self._answer(index, line, line.number in repeated, committer))
                    task.add_done_callback(lambda _: self._around.places.give_back())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            journal.close()

    async def _answer(self, index: int, line: Line, repeated: bool, committer: Committer) -> None:
        """Bring a line, the request of this index, to its committed result."""
        line_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            record = parse(line)
            if record.url != self.batch.endpoint:
                raise RecordError(
                    f"line {line.number}: url is {record.url!r:.60} and the batch is for {self.batch.endpoint}",
                    "url",
                    record.custom_id,
                )
            if repeated:
                message = f"line {line.number}: custom_id {record.custom_id!r:.60} is that of an earlier line"
                raise RecordError(message, "custom_id", record.custom_id)
        except RecordError as error:
            fault = {"code": "invalid_line", "message": str(error), "param": error.param, "line": line.number}
            result = Result(index, False, told(line_id, error.custom_id, error=fault))
        else:
            try:
                status, answer = await self._ask(record)
            except (ValueError, RecursionError) as error:  # what could be read and not be written again
                message = f"line {line.number}: body cannot be asked: {error}"[:300]
                status, answer = 400, ApiError(400, message, param="body").body
            response = {"status_code": status, "request_id": line_id, "body": answer}
            result = Result(index, status < 400, told(line_id, record.custom_id, response))
        try:
            await committer.commit(result)
        except OSError as error:
            logger.error("%s: a result cannot be kept: %s", self.batch.id, error)
            raise BatchFailedError("storage_error", f"results cannot be kept: {error.strerror}") from None
        self._count(result)
        self._count_journal(committer.num_bytes)

    def _count(self, result: Result) -> None:
        batch, store = self.batch, self._around.store
        batch.num_completed += result.good
        batch.num_failed += not result.good
        if store.stored_bytes > store.max_stored_bytes:
            raise BatchFailedError("storage_full", f"files and results take more than {store.max_stored_bytes} bytes")

    async def _ask(self, record: Record) -> tuple[int, Any]:
        """The endpoint's answer; where the engine's step failed, that of another try."""
        if record.body.get("stream"):
            return 400, ApiError(400, "stream: the requests of a batch have no streams", param="stream").body
        for number in range(MAX_TRIES):
            if number:
                await asyncio.sleep(_TRY_AGAIN_S)
            status, answer = await ask(self._around.app, record.url, record.body, self.batch.owner)
            if status < 500:
                break
            if status == 503:
                raise EngineGoneError
        return status, answer

    async def _write_out(self) -> None:
        """Write the output files, and let the journal go."""
        batch, store = self.batch, self._around.store
        if batch.status != "cancelling":
            batch.enter("finalizing")
        await self._save()
        code, message = f"batch_{batch.outcome}", _UNDONE.get(batch.outcome)

        def undone(custom_id: str | None) -> dict[str, Any] | None:
            if message is None:  # the batch failed, and tells why itself
                return None
            line_id = f"batch_req_{uuid.uuid4().hex}"
            return told(line_id, custom_id, error={"code": code, "message": message, "param": None, "line": None})

        parts = store.new_part(bounded=False), store.new_part(bounded=False)
        try:
            counts = await asyncio.to_thread(
                write_out, self._source, self._journal_path, self._around.max_line_bytes, parts, undone
            )
            batch.num_completed, batch.num_failed, _ = counts
            batch.num_requests = sum(counts)
            batch.has_output, batch.has_errors = (bool(part.num_bytes) for part in parts)
            for part, name, file_id in zip(parts, ("output", "errors"), (batch.output_id, batch.error_id), strict=True):
                if part.num_bytes:
                    filename = f"{batch.id}_{name}.jsonl"
                    await part.keep(batch.owner, filename, "batch_output", batch.output_lifetime_s, file_id)
        finally:
            for part in parts:
                part.drop()
        batch.enter(batch.outcome)
        await self._save()
        self._journal_path.unlink(missing_ok=True)
        self._count_journal(0)

    def _count_journal(self, num_bytes: int) -> None:
        """Have the store know how much the results take that are not yet files."""
        self._around.store.other_bytes += num_bytes - self._num_counted_bytes
        self._num_counted_bytes = num_bytes

    async def _save(self) -> None:
        await asyncio.to_thread(self.batch.save, self.folder)


async def _opened(path: Path) -> Journal:
    """A journal, opened in another thread; cancelled meanwhile, it is closed again."""
    opening = asyncio.ensure_future(asyncio.to_thread(Journal, path))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        (await opening).close()
        raise


def _committed(journal: Path, num_requests: int) -> tuple[Committed, int]:
    """The results that a journal has, and how many of them are good."""
    num_good = 0

    def count(record: dict[str, Any]) -> None:
        nonlocal num_good
        num_good += record["good"]

    return Committed(journal, num_requests, on_record=count), num_good


def _scan(source: Path, max_line_bytes: int) -> tuple[int, set[int]]:
    """How many requests a file has, and the numbers of those whose custom_id an earlier one has."""
    num_requests, seen, repeated = 0, set[str](), set[int]()
    for line in read_lines(source, max_line_bytes):
        num_requests += 1
        if num_requests > MAX_REQUESTS:
            continue
        try:
            custom_id = parse(line).custom_id
        except RecordError:
            continue
        if custom_id in seen:
            repeated.add(line.number)
        seen.add(custom_id)
    return num_requests, repeated
