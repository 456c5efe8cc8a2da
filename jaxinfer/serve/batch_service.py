"""The batches of a server: kept in a folder beside the files, run one beside the other, begun again after a restart.

FOLDER/batches/ID/batch.json   what is told of a batch
FOLDER/batches/ID/journal      its results, until they are a file
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from pathlib import Path

from starlette.types import ASGIApp

from jaxinfer.jobs.durable import sync_folder
from jaxinfer.serve.batch_runner import BatchRunner, Surroundings
from jaxinfer.serve.batch_schemas import BatchRequest
from jaxinfer.serve.batch_state import ENDED, Batch
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.file_store import FileStore
from jaxinfer.serve.offline import Places
from jaxinfer.serve.server import Server

logger = logging.getLogger("jaxinfer.serve")

MAX_BATCHES = 10_000
MAX_RUNNING = 100
_ID = re.compile(r"batch_[0-9a-f]{32}")


class BatchService:
    """Files and batches. `app` has the endpoints that lines are asked of.

    Raises:
        FolderInUseError: another process has the folder.
        OSError: it cannot be made or written.
    """

    def __init__(self, server: Server, app: ASGIApp, folder: Path):
        config = server.config
        self.store = FileStore(folder, config.max_file_bytes, config.max_stored_bytes)
        limit = config.max_batch_seqs or server.llm.max_num_seqs
        self._around = Surroundings(app, self.store, Places(server, limit), config.max_body_bytes)
        self._folder = folder / "batches"
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._runners: dict[str, BatchRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped = False
        self._batches = self._load()

    def start(self) -> None:
        """In the event loop: go on with the batches that an earlier process left."""
        for batch in self._batches.values():
            if batch.status not in ENDED:
                logger.info(
                    "%s goes on: %d of %d requests were done", batch.id, batch.num_completed, batch.num_requests
                )
                self._run(batch)

    async def stop(self) -> None:
        """End what runs; it goes on in the next process that has the folder."""
        if not self._stopped:
            self._stopped = True
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.store.close()

    async def create(self, owner: str, body: BatchRequest) -> Batch:
        """Begin a batch.

        Raises:
            ApiError: no such file, or as many batches as there may be.
        """
        file = self.store.get(owner, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise ApiError(
                400, f"input_file_id: the purpose of {file.id} is {file.purpose}, not batch", param="input_file_id"
            )
        if len(self._tasks) >= MAX_RUNNING:
            raise ApiError(
                429, f"{MAX_RUNNING} batches run, which is the most; try again later", headers={"Retry-After": "60"}
            )
        self._forget_oldest()
        batch = Batch.of(body, file)
        self.store.pinned[file.id] += 1
        try:
            await asyncio.to_thread(self._save_new, batch)
            self._batches[batch.id] = batch
            self._run(batch)
        finally:
            self.store.pinned[file.id] -= 1
        return batch

    def get(self, owner: str, batch_id: str) -> Batch:
        """A batch of an owner's. Raises the 404 for one that is not, or is another's."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"there is no batch {batch_id!r:.60}", code="batch_not_found")
        return batch

    def listed(self, owner: str) -> list[Batch]:
        """An owner's batches, the newest first."""
        found = [batch for batch in self._batches.values() if batch.owner == owner]
        return sorted(found, key=lambda batch: batch.made_ns, reverse=True)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Have a batch end with what it has. Raises the 404, and the 409 for one that has ended."""
        batch = self.get(owner, batch_id)
        if batch.status in ENDED:
            raise ApiError(409, f"{batch.id} is {batch.status} already", code="batch_ended")
        runner = self._runners.get(batch.id)
        if runner is None:
            raise ApiError(503, f"{batch.id} rests until the server is restarted, since the engine has failed")
        await runner.cancel()
        return batch

    def _run(self, batch: Batch) -> None:
        runner = BatchRunner(batch, self._folder / batch.id, self._around)
        self._runners[batch.id] = runner
        self.store.pinned[batch.input_file_id] += 1
        task = asyncio.get_running_loop().create_task(self._watched(runner), name=batch.id)
        self._tasks[batch.id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.pop(batch.id)
            self._runners.pop(batch.id)
            self.store.pinned[batch.input_file_id] -= 1

        task.add_done_callback(ended)

    async def _watched(self, runner: BatchRunner) -> None:
        batch = runner.batch
        try:
            await runner.run()
        except Exception as error:
            logger.error("%s failed", batch.id, exc_info=error)
            message = "the batch could not go on; the server's log has the details"
            batch.errors = [{"code": "storage_error", "message": message, "line": None, "param": None}]
            batch.enter("failed")
            await asyncio.to_thread(batch.save, runner.folder)

    def _save_new(self, batch: Batch) -> None:
        folder = self._folder / batch.id
        folder.mkdir(mode=0o700)
        batch.save(folder)
        sync_folder(self._folder)

    def _forget_oldest(self) -> None:
        """Make room for a batch."""
        ended = sorted((each for each in self._batches.values() if each.status in ENDED), key=lambda each: each.made_ns)
        for batch in ended[: max(0, len(self._batches) - MAX_BATCHES + 1)]:
            del self._batches[batch.id]
            shutil.rmtree(self._folder / batch.id, ignore_errors=True)

    def _load(self) -> dict[str, Batch]:
        found: dict[str, Batch] = {}
        for folder in self._folder.iterdir():
            if not _ID.fullmatch(folder.name):
                continue
            try:
                batch = Batch.load(folder)
            except FileNotFoundError:  # it was not answered yet when the process ended
                shutil.rmtree(folder, ignore_errors=True)
                continue
            except (ValueError, TypeError, OSError) as error:
                logger.warning("%s cannot be read and is passed over: %s", folder, error)
                continue
            if batch.status in ENDED:
                (folder / "journal").unlink(missing_ok=True)
            found[batch.id] = batch
        return found
