"""A file's bytes in order: counted, hashed and decompressed on the way, in bounded memory.

What comes must not depend on how it is asked for, since one pass counts the records of a damaged file and another
reads them: data is decompressed in pieces of one size, whatever the reader wants.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from jaxinfer.batch.inputs.file_scan import FileScan, InputError, Start

PIECE_BYTES = 1 << 18
_HEAD_BYTES = 1 << 12
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


class DamagedStreamError(InputError):
    """Compressed data that cannot be decompressed from where the stream stands; says why."""


class Stored(io.RawIOBase):
    """The bytes of a file as they are stored; `num_bytes` and `digest` are of those read so far."""

    def __init__(self, file: Any, digest: Any = None):
        self._file = file
        self.digest = digest
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), PIECE_BYTES))
        buffer[: len(data)] = data
        self.num_bytes += len(data)
        if self.digest is not None:
            self.digest.update(data)
        return len(data)


class _Inflated(io.RawIOBase):
    """What GZIP or ZLIB data decompresses to, of all members where several follow each other."""

    def __init__(self, stored: Stored, kind: str):
        self._stored, self._kind = stored, kind
        self._inflater = zlib.decompressobj(_WINDOW_BITS[kind])
        self._piece = memoryview(b"")
        self._damage: DamagedStreamError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._piece = memoryview(self._next_piece())
        num_bytes = min(len(buffer), len(self._piece))
        buffer[:num_bytes] = self._piece[:num_bytes]
        self._piece = self._piece[num_bytes:]
        return num_bytes

    def _next_piece(self) -> bytes:
        """Empty at the end."""
        if self._damage is not None:
            raise self._damage
        while True:
            if self._inflater.eof:
                following = self._inflater.unused_data.lstrip(b"\0")  # files are padded with zeros
                while not following and (stored := self._stored.read(PIECE_BYTES)):
                    following = stored.lstrip(b"\0")
                if not following:
                    return b""
                self._inflater = zlib.decompressobj(_WINDOW_BITS[self._kind])
            else:
                following = self._inflater.unconsumed_tail or self._stored.read(PIECE_BYTES) or b""
            before = self._inflater.copy()
            try:
                piece = self._inflater.decompress(following, PIECE_BYTES)
            except zlib.error as error:
                self._damage = DamagedStreamError(f"the file's {self._kind} data is damaged ({error})")
                piece = _up_to_the_damage(before, following)
                if not piece:
                    raise self._damage from None
            if piece:
                return piece
            if not following and not self._inflater.eof:
                raise DamagedStreamError(f"the file's {self._kind} data ends early")


class Stream:
    """A file's bytes, decompressed, from `offset` on.

    read, readline: as of a file.
    size: of all bytes, decompressed; None where only reading them tells.
    """

    def __init__(self, file: Any, is_plain: Callable[[bytes], bool], offset: int = 0, hashing: bool = False):
        """`is_plain` says of a file's first bytes that they are no compressed data, whatever they look like."""
        head = file.read(_HEAD_BYTES)
        kind = None if is_plain(head) else _compression(head)
        self.size = file.seek(0, io.SEEK_END) if kind is None else None
        self.offset = offset
        file.seek(offset if kind is None else 0)
        self._stored = Stored(file, hashlib.sha256() if hashing else None)
        self._reader = io.BufferedReader(self._stored if kind is None else _Inflated(self._stored, kind), PIECE_BYTES)
        self.read, self.readline = self._reader.read, self._reader.readline  # no Python between: called a record
        if kind is not None:
            self.skip(offset)

    def take(self, num_bytes: int) -> bytes:
        """As `read`, but holds no more than there is."""
        if num_bytes <= PIECE_BYTES:
            return self.read(num_bytes)
        pieces, left = [], num_bytes
        while left and (piece := self.read(min(left, PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def skip(self, num_bytes: int | None) -> int:
        """Passes over this many bytes, or all; how many there were."""
        num_skipped = 0
        while num_bytes is None or num_skipped < num_bytes:
            piece = self.read(PIECE_BYTES if num_bytes is None else min(num_bytes - num_skipped, PIECE_BYTES))
            if not piece:
                break
            num_skipped += len(piece)
        return num_skipped

    def finish(self) -> tuple[int, str]:
        """Reads what is left as it is stored: how many bytes the file has, and their SHA-256."""
        while self._stored.read(PIECE_BYTES):
            pass
        return self._stored.num_bytes, self._stored.digest.hexdigest()


def scan_of(stream: Stream, offsets: Iterable[int], every: int) -> FileScan:
    """What a first pass finds, given where each record of `stream` begins."""
    starts: list[Start] = []
    num_records = 0
    for offset in offsets:
        if num_records % every == 0:
            starts.append((num_records, offset))
        num_records += 1
    return FileScan(*stream.finish(), num_records, starts)


def _up_to_the_damage(inflater: Any, stored: bytes) -> bytes:
    """What comes out of `stored` before the byte at which zlib gives up, whole pieces of which it would drop."""
    pieces = []
    try:
        for at in range(len(stored)):
            pieces.append(inflater.decompress(stored[at : at + 1]))
    except zlib.error:
        pass
    return b"".join(pieces)


def _compression(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b\x08"):
        return "GZIP"
    if len(head) < 2 or head[0] & 0x0F != 8 or head[0] >> 4 > 7 or int.from_bytes(head[:2]) % 31:
        return None
    try:  # one in a thousand files begins like this by chance
        zlib.decompressobj().decompress(head, _HEAD_BYTES)
    except zlib.error:
        return None
    return "ZLIB"
