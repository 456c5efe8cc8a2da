"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in streamed text and holds back what may become one.

    The stop string that is complete first wins, and of several that end at the same character the longest. So the
    result does not depend on how the text is cut into pieces, and nothing ever waits behind a complete stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """`include_in_output` leaves the stop string itself at the end of the text.

        Raises:
            TypeError: `stops` is one string or holds something other than strings.
            ValueError: a stop string is empty.
        """
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise TypeError(f"stop: expected a list of strings, got {stops!r}")
        if not all(stops):
            raise ValueError("stop: a stop string is empty; remove it")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string that ends it, if one does.

        After a match everything further is dropped, and the same stop string is returned again.
        """
        if self._matched is not None:
            return "", self._matched
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            end, start, self._matched = min(found)
            self._held = ""
            return buffer[: end if self._include else start], self._matched
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """The text still held back, for when generation ends without a stop string."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, buffer: str) -> int:
        """The length of the longest end of `buffer` that a stop string begins with."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
