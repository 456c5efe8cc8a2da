"""TFRecord files of `tf.train.Example`s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxinfer.batch.example import decode
from jaxinfer.batch.framing import CHECKSUM, HEADER, masked_crc
from jaxinfer.batch.inputs.file_scan import MAX_RECORD_BYTES, FileScan, Start
from jaxinfer.batch.inputs.streams import DamagedStreamError, Stream, scan_of
from jaxinfer.batch.records import InputRecord


def scan(file: Any, every: int) -> FileScan:
    stream = Stream(file, _starts_with_frame, hashing=True)
    return scan_of(stream, (offset for offset, _, _ in frames(stream, keep_data=False)), every)


def read(file: Any, start: Start) -> Iterator[InputRecord]:
    index, offset = start
    stream = Stream(file, _starts_with_frame, offset or 0)
    for place, data, error in frames(stream, keep_data=True):
        if error is None:
            try:
                yield InputRecord(index, place, decode(data))
            except ValueError as wrong:
                error = str(wrong)
        if error is not None:
            yield InputRecord(index, place, error=error)
        index += 1


def _starts_with_frame(head: bytes) -> bool:
    """Whether a file that begins with `head` begins with a record's length and the checksum that fits it."""
    return len(head) >= HEADER.size and masked_crc(head[:8]) == HEADER.unpack_from(head)[1]


def frames(stream: Stream, keep_data: bool) -> Iterator[tuple[int, bytes, str | None]]:
    """Each record from where `stream` stands: its offset, its data, and what is wrong with it.

    Without `keep_data` the data is passed over and its checksum not looked at, which changes neither how many records
    there are nor where they begin.
    """
    offset = stream.offset
    try:
        while header := stream.read(HEADER.size):
            if len(header) < HEADER.size:
                rest = f"the rest of the file ({len(header)} bytes) cannot be read"
                yield offset, b"", f"the file ends within a record's length: {rest}"
                return
            length, checksum = HEADER.unpack(header)
            if masked_crc(header[:8]) != checksum:
                rest = len(header) + stream.skip(None)
                why = "the checksum of the record's length does not fit it"
                yield offset, b"", f"{why}: the rest of the file ({rest} bytes) cannot be read"
                return
            body_bytes = length + CHECKSUM.size
            kept = keep_data and length <= MAX_RECORD_BYTES
            body = stream.take(body_bytes) if kept and _fits(stream, offset, body_bytes) else b""
            found = len(body) or stream.skip(body_bytes)
            if found < body_bytes:
                rest = f"the rest of the file ({len(header) + found} bytes) cannot be read"
                yield offset, b"", f"the file ends within a record of {length} bytes: {rest}"
                return
            data = body[:-4]
            yield offset, data, _wrong_with(data, body, length) if keep_data else None
            offset += len(header) + body_bytes
    except DamagedStreamError as error:
        yield offset, b"", f"{error}: nothing from here on can be read"


def _fits(stream: Stream, offset: int, body_bytes: int) -> bool:
    return stream.size is None or offset + HEADER.size + body_bytes <= stream.size


def _wrong_with(data: bytes, body: bytes, length: int) -> str | None:
    if not body:
        return f"the record has {length} bytes, more than one may have ({MAX_RECORD_BYTES})"
    if masked_crc(data) != CHECKSUM.unpack_from(body, length)[0]:
        return "the checksum of the record's data does not fit it"
    return None
