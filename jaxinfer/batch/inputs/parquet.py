"""Parquet files, a batch of rows at a time, through pyarrow.

A file whose footer cannot be read is one record with an error; of a row group whose pages cannot be read, each row from
there on is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxinfer.batch.inputs.file_scan import FileScan, Start
from jaxinfer.batch.inputs.streams import PIECE_BYTES, Stored
from jaxinfer.batch.records import InputRecord

_BATCH_ROWS = 256
_MAX_ROWS_PER_BYTE = 1024  # more than columns of one value compress to
_PLAIN = (str, int, float, bytes, bool, type(None))


def scan(file: Any, every: int) -> FileScan:
    stored = Stored(file, hashlib.sha256())
    while stored.read(PIECE_BYTES):
        pass
    try:
        num_records = _open(file).metadata.num_rows
    except ValueError:
        num_records = 1
    starts: list[Start] = [(index, None) for index in range(0, num_records, every)]
    return FileScan(stored.num_bytes, stored.digest.hexdigest(), num_records, starts)


def read(file: Any, start: Start) -> Iterator[InputRecord]:
    index = start[0]
    try:
        parquet = _open(file)
    except ValueError as error:
        yield InputRecord(index, None, error=str(error))
        return
    first = 0
    for group in range(parquet.num_row_groups):
        end = first + parquet.metadata.row_group(group).num_rows
        if end > index:
            yield from _rows(parquet, group, first, index, end)
            index = end
        first = end


def _open(file: Any) -> pq.ParquetFile:
    """Raises ValueError with what is wrong with the file's footer."""
    num_bytes = max(file.seek(0, 2), 1)  # the footer's strings and lists have no more
    file.seek(0)
    try:
        parquet = pq.ParquetFile(
            file,
            pre_buffer=False,
            page_checksum_verification=True,
            thrift_string_size_limit=num_bytes,
            thrift_container_size_limit=num_bytes,
        )
        names = parquet.schema_arrow.names
    except (pa.ArrowException, OSError, ValueError) as error:
        _raise_if_io(error)
        raise ValueError(f"the file is no Parquet file, or its footer is damaged: {_short(error)}") from None
    # What the footer says of columns is not looked at: pyarrow ends the process where that is damaged.
    num_rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    if min(num_rows, default=0) < 0 or sum(num_rows) != parquet.metadata.num_rows:
        raise ValueError("the file's footer is damaged: its row groups do not have the file's number of rows")
    if sum(num_rows) > num_bytes * _MAX_ROWS_PER_BYTE:
        raise ValueError(f"the file's footer is damaged: it claims {sum(num_rows)} rows in {num_bytes} bytes")
    if len(set(names)) < len(names):
        raise ValueError("two columns of the file have the same name: rename one")
    if "\0" in parquet.schema_arrow.to_string(show_field_metadata=False, show_schema_metadata=False):
        raise ValueError("a column's name has a NUL: rename the column")
    return parquet


def _rows(parquet: pq.ParquetFile, group: int, first: int, index: int, end: int) -> Iterator[InputRecord]:
    """The rows from `index` up to `end` of the row group that begins with row `first`."""
    try:
        # From the group's first row in any case, so that damage ends the same batch wherever reading starts.
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
            if first + len(batch) > index:
                for fields, error in _fields(batch.slice(max(index - first, 0))):
                    yield InputRecord(index, None, fields, error)
                    index += 1
            first += len(batch)
        error = "it has fewer rows than the file's footer says"
    except (pa.ArrowException, OSError) as wrong:
        _raise_if_io(wrong)
        error = _short(wrong)
    for row in range(index, end):
        yield InputRecord(row, None, error=f"row group {group} of the file cannot be read from here on: {error}")


def _fields(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], str | None]]:
    for column, field in enumerate(batch.schema):
        if pa.types.is_temporal(field.type):  # whose nanoseconds Python's own types do not hold
            batch = batch.set_column(column, field.name, batch.column(column).cast(pa.string()))
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # a string that is no UTF-8, say: of one row, and not of its neighbours
        for row in range(len(batch)):
            try:
                yield _plain(batch.slice(row, 1).to_pylist()[0]), None
            except (ValueError, OverflowError) as error:
                yield {}, f"the row has a value that cannot be read: {_short(error)}"
        return
    for row in rows:
        yield _plain(row), None


def _plain(value: Any) -> Any:
    """As JSON has it: what it lacks is written out."""
    if isinstance(value, dict):
        return {name: each if type(each) in _PLAIN else _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [each if type(each) in _PLAIN else _plain(each) for each in value]
    if isinstance(value, np.generic):  # halves of floats, from older versions of pyarrow
        return value.item()
    return value if type(value) in _PLAIN else str(value)


def _raise_if_io(error: Exception) -> None:
    """What the file's own reading raised has a number; pyarrow's OSError for damaged data has none."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
