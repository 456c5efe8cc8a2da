"""Server-sent events, from bytes as they come. The format: WHATWG HTML, section 9.2."""

from __future__ import annotations


class LineTooLongError(Exception):
    """A line that the parser refuses to keep."""


class SseParser:
    """Splits a stream of bytes into the data of its events, wherever the bytes were cut.

    Fields other than `data` are skipped, comments too. A line is bounded, so that a server without line ends cannot
    fill the memory.
    """

    def __init__(self, max_line_bytes: int = 8 * 2**20):
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._max_line_bytes = max_line_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in this chunk.

        Raises:
            LineTooLongError: a line longer than `max_line_bytes`.
        """
        self._rest += chunk
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        if max(len(rest), *(len(line) for line in lines), 0) > self._max_line_bytes:
            raise LineTooLongError(f"a line of more than {self._max_line_bytes} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    @property
    def unfinished(self) -> bool:
        """Whether bytes of an event have come whose end has not."""
        return bool(self._data or self._rest.strip())
