"""Files of clients in one folder: kept across restarts, seen by their owner alone, bounded in number and bytes.

    FOLDER/lock                one server has the folder at a time
    FOLDER/files/ID            the content of a file
    FOLDER/files/ID.json       what is told of it; a file exists once this does
    FOLDER/parts/…             files that are being written; emptied at the start

Ids are made here and checked before they name a path. Names that clients give are kept as data only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.jobs.durable import FolderLock, move_durably, write_durably
from jaxinfer.serve.errors import ApiError

logger = logging.getLogger("jaxinfer.serve")

MAX_FILES = 10_000
MAX_NAME_CHARACTERS = 255
_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredFile:
    """A file as it is told; times in seconds since the epoch, `made_ns` for their order."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    made_ns: int
    expires_at: int | None = None

    def told(self) -> dict[str, Any]:
        """In the shape of the OpenAI API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.made_ns // 10**9,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files under a folder. Used in one event loop.

    Raises:
        FolderInUseError: another process has the folder.
        OSError: it cannot be made or written.
    """

    def __init__(self, folder: Path, max_file_bytes: int, max_stored_bytes: int, max_files: int = MAX_FILES):
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.max_stored_bytes = max_stored_bytes
        self.pinned: Counter[str] = Counter()
        """Ids of files that something reads, which keep them from going."""
        self.other_bytes = 0
        """What is kept beside files under the folder, and counts as stored."""
        self._max_files = max_files
        self._files_folder, self._parts_folder = folder / "files", folder / "parts"
        for each in (folder, self._files_folder, self._parts_folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = FolderLock(folder)
        self._parts: dict[str, int] = {}
        self._files = self._load()

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    @property
    def stored_bytes(self) -> int:
        """Of all files, those that are being written included, and what else there is."""
        return sum(file.num_bytes for file in self._files.values()) + sum(self._parts.values()) + self.other_bytes

    def get(self, owner: str, file_id: str, param: str | None = None) -> StoredFile:
        """A file of an owner's. Raises the 404 for one that is not, or is another's."""
        self._sweep()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {file_id!r:.60}", param=param, code="file_not_found")
        return file

    def path(self, file_id: str) -> Path:
        """Where the content of a file is. Raises `ValueError` for what is no id."""
        if not _ID.fullmatch(file_id):
            raise ValueError(f"{file_id!r:.60} is no id of a file")
        return self._files_folder / file_id

    def listed(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """An owner's files, the newest first."""
        self._sweep()
        found = [file for file in self._files.values() if file.owner == owner and purpose in (None, file.purpose)]
        return sorted(found, key=lambda file: file.made_ns, reverse=True)

    def delete(self, owner: str, file_id: str) -> None:
        """Take a file away. Raises the 404 for one that is not there, 409 for one that is being read."""
        self.get(owner, file_id)
        if self.pinned[file_id]:
            raise ApiError(409, f"{file_id} is the input of a batch that runs; cancel it first", code="file_in_use")
        self._remove(file_id)

    def new_part(self, bounded: bool = True) -> Part:
        """A file to be written. Raises the 429 where there are too many files, unless it is not `bounded`."""
        self._sweep()
        if bounded and len(self._files) + len(self._parts) >= self._max_files:
            raise ApiError(
                429, f"{self._max_files} files are kept, which is the most; delete some", code="too_many_files"
            )
        return Part(self, self._parts_folder / uuid.uuid4().hex)

    def _sweep(self) -> None:
        """Take away the files whose time has come."""
        now_s = time.time()
        for file in list(self._files.values()):
            if file.expires_at is not None and file.expires_at <= now_s and not self.pinned[file.id]:
                self._remove(file.id)

    def _remove(self, file_id: str) -> None:
        path = self.path(file_id)
        del self._files[file_id]
        path.with_suffix(".json").unlink(missing_ok=True)  # first: without it there is no file
        path.unlink(missing_ok=True)

    def _load(self) -> dict[str, StoredFile]:
        """What an earlier process left; what it had not finished is removed."""
        for path in self._parts_folder.iterdir():
            path.unlink()
        for path in self._files_folder.glob("*.new"):
            path.unlink()
        found: dict[str, StoredFile] = {}
        for path in self._files_folder.glob("file-*.json"):
            try:
                file = StoredFile(**json.loads(path.read_bytes()))
                if file.id == path.stem and self.path(file.id).is_file():
                    found[file.id] = file
                    continue
            except (ValueError, TypeError, OSError) as error:
                logger.warning("%s cannot be read and is passed over: %s", path, error)
        for path in self._files_folder.glob("file-*"):
            if _ID.fullmatch(path.name) and not path.with_suffix(".json").exists():
                path.unlink()
        return found


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


class Part:
    """A file that is being written. `write` may run in another thread; one call at a time."""

    def __init__(self, store: FileStore, path: Path):
        self._store = store
        self._path = path
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 (until keep() or drop())
        self._name = path.name
        self._store._parts[self._name] = 0

    @property
    def num_bytes(self) -> int:
        return self._store._parts[self._name]

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are going to be written. Raises the 413 or 429 where they are too many."""
        store = self._store
        if self.num_bytes + num_bytes > store.max_file_bytes:
            raise ApiError(413, f"the file is larger than {store.max_file_bytes} bytes", param="file")
        if store.stored_bytes + num_bytes > store.max_stored_bytes:
            raise ApiError(
                429,
                f"files and results would take more than {store.max_stored_bytes} bytes; delete some",
                code="storage_full",
            )
        store._parts[self._name] += num_bytes

    def count(self, num_bytes: int) -> None:
        """Count bytes as `reserve` does, however many: results are not refused for want of room."""
        self._store._parts[self._name] += num_bytes

    def write(self, content: bytes) -> None:
        self._file.write(content)

    async def keep(
        self, owner: str, filename: str, purpose: str, lifetime_s: int | None, file_id: str | None = None
    ) -> StoredFile:
        """Make what was written a file, in place of one of that id."""
        made_ns = time.time_ns()
        file = StoredFile(
            file_id or new_file_id(),
            owner,
            filename[:MAX_NAME_CHARACTERS],
            purpose,
            self.num_bytes,
            made_ns,
            None if lifetime_s is None else made_ns // 10**9 + lifetime_s,
        )
        await asyncio.to_thread(self._place, self._store.path(file.id), json.dumps(dataclasses.asdict(file)).encode())
        del self._store._parts[self._name]
        self._store._files[file.id] = file
        return file

    def _place(self, path: Path, described: bytes) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        move_durably(self._path, path)
        write_durably(path.with_suffix(".json"), described)

    def drop(self) -> None:
        """Remove it; nothing where it was kept."""
        if self._store._parts.pop(self._name, None) is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
