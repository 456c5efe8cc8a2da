"""Files replaced whole, and folders with one owner."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import pytest

from jaxinfer.jobs.durable import FolderInUseError, FolderLock, naming, write_durably


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def fail(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    write_durably(path, b"new")
    assert path.read_bytes() == b"new" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_has_one_owner_until_its_end(tmp_path):
    code = (
        "import sys, pathlib; from jaxinfer.jobs.durable import FolderLock\n"
        "lock = FolderLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match="in use"):
            FolderLock(tmp_path)
        other.kill()
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUseError, match="in use"):
        FolderLock(tmp_path)
    lock.close()
    FolderLock(tmp_path).close()


def test_a_file_system_without_locks_is_told_from_a_folder_in_use(tmp_path, monkeypatch):
    def fail(*lock):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="cannot be locked: No locks available") as caught:
        FolderLock(tmp_path)
    assert not isinstance(caught.value, FolderInUseError)


def test_what_cannot_be_written_says_where(tmp_path):
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}")), naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
