"""Files replaced whole, and folders with one owner."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxinfer.jobs.durable import FolderInUseError, FolderLock, write_durably


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
