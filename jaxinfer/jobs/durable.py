"""Files that are whole or not there, whenever the machine stops; and folders with one owner."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


class FolderInUseError(OSError):
    """Another process has the folder."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has what fails to be written say where: a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power failure, where the system can say so."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file: after a crash it holds the old content or the new, never part of one. Its name plus `.new` is
    used meanwhile."""
    new = path.with_name(path.name + ".new")
    with naming(path), open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    move_durably(new, path)


def move_durably(path: Path, to: Path) -> None:
    """Rename a file that has been synced, over what is there."""
    os.replace(path, to)
    sync_folder(to.parent)


class FolderLock:
    """Held by one process at a time, and let go by its end, however it ends.

    Raises:
        FolderInUseError: another has it.
        OSError: the file system has no locks.
    """

    def __init__(self, folder: Path):
        self._file = open(folder / "lock", "ab")  # noqa: SIM115 (held until close())
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.close()
            raise FolderInUseError(f"{folder} is in use by another process") from None
        except OSError as error:  # a network's file system without locks, say
            self._file.close()
            raise OSError(error.errno, f"{folder} cannot be locked: {error.strerror}") from None

    def close(self) -> None:
        """Let others have the folder."""
        self._file.close()
