"""Which files patterns name, of what format they are, and opening them: local paths, and URLs through fsspec."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxinfer.batch.inputs.file_scan import InputError

FORMATS = ("tfrecord", "jsonl", "parquet")
_FORMAT_OF_SUFFIX = {
    "tfrecord": "tfrecord", "tfrecords": "tfrecord", "tfrec": "tfrecord",
    "jsonl": "jsonl", "ndjson": "jsonl",
    "parquet": "parquet",
}  # fmt: skip
_SHARD = re.compile(r"-\d+-of-\d+$")
_TELLING = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that `patterns` name: local paths or URLs, with `*`, `?`, `[…]` and `**` or without.

    Sorted within each pattern, the patterns in their order, each file once.

    Raises:
        InputError: a pattern names no file, or a URL's package is not installed.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        is_url = _URL.match(pattern) is not None and not pattern.startswith("file://")
        for file in _urls(pattern) if is_url else _paths(pattern.removeprefix("file://")):
            found.setdefault(file if is_url else os.path.realpath(file), file)
    return list(found.values())


def format_of(path: str, given: str | None = None) -> str:
    """ "tfrecord", "jsonl" or "parquet": what is `given`, else what the file's name says.

    Raises:
        InputError: neither says one.
    """
    if given is not None:
        if given not in FORMATS:
            raise InputError(f"{given!r} is no format of inputs: give one of {', '.join(FORMATS)}")
        return given
    name = _SHARD.sub("", re.split(r"[/\\]", path)[-1].lower())
    stem = _SHARD.sub("", re.sub(r"\.(gz|gzip|zlib)$", "", name))
    found = _FORMAT_OF_SUFFIX.get(stem.rpartition(".")[2])
    if found == "parquet" and stem != name:
        raise InputError(f"{path}: Parquet is compressed within; decompress the file")
    if found is None:
        raise InputError(f"{path}: its name says no format (as prompts.tfrecord would): give --input-format")
    return found


def open_file(path: str) -> Any:
    """A file to read bytes from, with `seek`. Raises OSError as it comes, and InputError for a URL nobody can open."""
    if not _URL.match(path):
        return open(path, "rb", buffering=0)
    filesystem, place = _filesystem(path)
    return filesystem.open(place, "rb")


def stamp(path: str) -> str:
    """What changes when a file does, without reading it: its size and times, or what a store tells of it.

    A file whose stamp is another may still have the same content; one whose stamp is empty, as where a web server tells
    nothing, may have changed. Raises OSError as it comes.
    """
    if not _URL.match(path):
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"  # a copy may bring its time along
    filesystem, place = _filesystem(path)
    filesystem.invalidate_cache()  # what it told before
    about = filesystem.info(place)
    told = [f"{name}={about[name]}" for name in _TELLING if about.get(name) is not None]
    return f"{about.get('size')} {' '.join(told)}" if told else ""


def _paths(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        raise InputError(f"{pattern} is a folder: name its files, as {os.path.join(pattern, '*.tfrecord')}")
    if os.path.isfile(pattern):  # whatever characters its name has
        return [pattern]
    if os.path.exists(pattern):
        raise InputError(f"{pattern} is no regular file: a job reads its inputs more than once; write it to one")
    found = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not found:
        raise InputError(f"{pattern}: no file has this name" + (" or matches it" if glob.has_magic(pattern) else ""))
    return found


def _urls(pattern: str) -> list[str]:
    filesystem, place = _filesystem(pattern)
    if not glob.has_magic(place):
        if filesystem.isdir(place):
            raise InputError(f"{pattern} is a folder: name its files, as {pattern.rstrip('/')}/*.tfrecord")
        if not filesystem.exists(place):
            raise InputError(f"{pattern}: no file has this name")
        return [pattern if "::" in pattern else filesystem.unstrip_protocol(place)]
    if "::" in pattern:
        raise InputError(f"{pattern}: a chain of URLs takes no wildcards: name its files one by one")
    found = sorted(path for path, about in filesystem.glob(place, detail=True).items() if about["type"] != "directory")
    if not found:
        raise InputError(f"{pattern}: no file matches it")
    return [filesystem.unstrip_protocol(path) for path in found]


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(f"{url}: URLs are read with fsspec: pip install 'jaxinfer[batch]'") from None
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol whose package is missing, or that nobody knows
        raise InputError(f"{url}: {error}") from None
