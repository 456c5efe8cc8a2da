"""Files of one JSON object a line. Blank lines are none; whatever else is none, is a record with an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from jaxinfer.batch.inputs.file_scan import MAX_RECORD_BYTES, FileScan, Start
from jaxinfer.batch.inputs.streams import PIECE_BYTES, DamagedStreamError, Stream, scan_of
from jaxinfer.batch.records import InputRecord

MAX_DEPTH = 64  # of lists and objects in each other: enough for any schema, and far from where recursion ends
_BOM = b"\xef\xbb\xbf"
# What makes a second look necessary: halves of surrogate pairs and NUL, which JSON can escape.
_SUSPICIOUS = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")


def scan(file: Any, every: int) -> FileScan:
    stream = Stream(file, _is_plain, hashing=True)
    return scan_of(stream, (offset for offset, _, _ in _lines(stream)), every)


def read(file: Any, start: Start) -> Iterator[InputRecord]:
    index, offset = start
    stream = Stream(file, _is_plain, offset or 0)
    for place, line, error in _lines(stream):
        fields: dict[str, Any] = {}
        if error is None:
            try:
                fields = _object(line)
            except ValueError as wrong:
                error = str(wrong)
        yield InputRecord(index, place, fields, error)
        index += 1


def _is_plain(head: bytes) -> bool:
    return not head or head[:1] in b"{ \t\r\n" or head.startswith(_BOM)


def _lines(stream: Stream) -> Iterator[tuple[int, bytes, str | None]]:
    """Each line that is not blank: its offset, its bytes, and why it is none."""
    offset = stream.offset
    try:
        while line := stream.readline(MAX_RECORD_BYTES + 1):
            num_bytes = len(line)
            if offset == 0:
                line = line.removeprefix(_BOM)
            if num_bytes > MAX_RECORD_BYTES and not line.endswith(b"\n"):
                while (more := stream.readline(PIECE_BYTES)) and not more.endswith(b"\n"):
                    num_bytes += len(more)
                num_bytes += len(more)
                yield offset, b"", f"the line has {num_bytes} bytes, more than one may have ({MAX_RECORD_BYTES})"
            elif line and not line.isspace():
                yield offset, line, None
            offset += num_bytes
    except DamagedStreamError as error:
        yield offset, b"", f"{error}: nothing from here on can be read"


def _object(line: bytes) -> dict[str, Any]:
    """Raises ValueError with what is wrong."""
    try:
        # Not json.loads of bytes, which takes UTF-16 and UTF-32 for what they look like.
        found = _decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is no UTF-8 (its byte {error.start}, {error.reason})") from None
    except RecursionError:
        raise ValueError(f"the line nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"the line is no JSON: {error}"[:300]) from None
    if not isinstance(found, dict):
        raise ValueError(f"the line is no JSON object, but {_NAMES[type(found)]}")
    if _SUSPICIOUS.search(line) or line.count(b"[") + line.count(b"{") > MAX_DEPTH:
        _look_at(found, 1)
    return found


_NAMES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_decode = json.JSONDecoder(parse_constant=_no_constant).decode


def _look_at(value: Any, depth: int) -> None:
    """Raises ValueError for what could not be written again, or could be taken for something else."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("the line has half of a surrogate pair, which is no text: replace the escape") from None
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise ValueError(f"the line nests deeper than {MAX_DEPTH} levels")
        for each in value.values() if isinstance(value, dict) else value:
            _look_at(each, depth + 1)
        for name in value if isinstance(value, dict) else ():
            _look_at(name, depth)
            if "\0" in name:
                raise ValueError(f"the field's name {name[:60]!r} has a NUL: rename the field")
