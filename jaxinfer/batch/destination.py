"""Where finished files go: a local folder, or a folder of an object store by its fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.batch.config import is_remote, local_folder
from jaxinfer.batch.errors import JobError
from jaxinfer.jobs.durable import move_durably, naming

_OWN_NAMES = ("results-", "errors-")
_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"))


class Destination:
    """A folder in which a file is whole or not there.

    A local file is written beside its name, synced and renamed. A remote one is written locally, in `scratch`, and then
    put under its name, which object stores do at once or not at all.
    """

    def __init__(self, output: str, scratch: Path):
        self.output = output
        self._scratch = scratch
        self._fs: Any = None
        if is_remote(output):
            self._fs, self._root = _file_system(output)
            if not _STORES.intersection(_protocols(self._fs)):  # those make buckets, and know no folders
                self._fs.makedirs(self._root, exist_ok=True)
        else:
            self._folder = local_folder(output)
            self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, write: Callable[[Path], None]) -> None:
        """Have `write` make a file, and give it its name when it is whole; one of that name is replaced.

        `write` syncs what it writes.
        """
        part = (self._folder if self._fs is None else self._scratch) / f".{name}.part"
        try:
            with naming(part):
                write(part)
            if self._fs is None:
                move_durably(part, self._folder / name)
            else:
                self._fs.put_file(os.fspath(part), f"{self._root}/{name}")
        finally:
            part.unlink(missing_ok=True)

    def put_bytes(self, name: str, content: bytes) -> None:
        """A small file at once."""

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        self.put(name, write)

    def read_bytes(self, name: str) -> bytes:
        """Of a small file. Raises `FileNotFoundError` where there is none."""
        if self._fs is None:
            return (self._folder / name).read_bytes()
        return self._fs.cat_file(f"{self._root}/{name}")

    def is_own(self, path: str) -> bool:
        """Whether a path is that of a file that a job writes here."""
        folder, _, name = path.rpartition("/")
        if not name.startswith(_OWN_NAMES):
            return False
        if self._fs is None:
            return not is_remote(path) and os.path.realpath(folder) == os.path.realpath(self._folder)
        return folder == self.output.rstrip("/")

    def names(self) -> list[str]:
        """Of what is there."""
        if self._fs is None:
            return sorted(path.name for path in self._folder.iterdir())
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:  # a store has no folder before it has a file in it
            return []
        return sorted(path.rsplit("/", 1)[-1] for path in found)

    def num_bytes(self, name: str) -> int | None:
        """The size of a file, or None where there is none."""
        try:
            return (self._folder / name).stat().st_size if self._fs is None else self._fs.size(f"{self._root}/{name}")
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Drop a file, if it is there."""
        if self._fs is None:
            (self._folder / name).unlink(missing_ok=True)
        elif self.num_bytes(name) is not None:
            self._fs.rm_file(f"{self._root}/{name}")


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise JobError(f"--output {url}: {error}; pip install 'jaxinfer[batch]', and the store's package") from None


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
