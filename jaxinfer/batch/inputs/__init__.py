"""Files of prompts: TFRecord, JSONL and Parquet, local or behind URLs, plain or compressed, read record by record.

What cannot be read is a record too, with an `error` in place of fields: nothing is passed over in silence, and a
record's index does not depend on the damage of others. Memory does not grow with the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any

from jaxinfer.batch.inputs.file_scan import FileScan, InputError, Start
from jaxinfer.batch.inputs.files import expand, format_of, open_file, stamp
from jaxinfer.batch.records import InputRecord

__all__ = ["FileScan", "InputError", "Start", "expand", "format_of", "read", "scan", "stamp"]


def scan(path: str, format: str, every: int) -> FileScan:
    """Reads the whole file once: its size, its SHA-256, its number of records, and where each `every`th begins.

    Raises:
        OSError: the file cannot be opened or read.
        InputError: a package that is needed to read it is not installed.
    """
    if every < 1:
        raise ValueError(f"every={every}: give at least 1")
    module = _module(format)
    with open_file(path) as file:
        return module.scan(file, every)


def read(path: str, format: str, start: Start = (0, 0), count: int | None = None) -> Iterator[InputRecord]:
    """The records from `start` (one that `scan` found) on: `count` of them, or all; fewer where there are no more.

    Of a compressed file what comes before is decompressed again, for it has no places to begin at.

    Raises:
        OSError, InputError: as `scan`, when the first record is asked for; InputError too where a compressed file
            was damaged since it was scanned.
    """
    module = _module(format)
    with open_file(path) as file:
        yield from islice(module.read(file, start), count)


def _module(format: str) -> Any:
    try:
        return import_module(f"jaxinfer.batch.inputs.{format}")
    except ImportError as error:
        raise InputError(f"{format} files need {error.name}: pip install 'jaxinfer[batch]'") from None
