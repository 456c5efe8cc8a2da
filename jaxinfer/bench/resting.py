"""A process of a benchmark that answers questions, and rests between two."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any


class RestingProcess:
    """`python -m MODULE ARGUMENTS`, started when entered and ended, by the end of its input, when left.

    It writes a line of JSON when it is ready, `first`, and one for each line of JSON that it reads.

    Args:
        module: what it runs, given `arguments` as JSON.
        name: in the message of an error.

    Raises:
        RuntimeError: it could not start, or ended; the message has its last line.
    """

    def __init__(self, module: str, arguments: Any, name: str):
        self._command = [sys.executable, "-m", module, json.dumps(arguments)]
        self._name = name

    def __enter__(self) -> Any:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.first = self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()  # the end of its input is the end of its work
        self._process.wait()
        self._log.close()

    def ask(self, question: Any) -> Any:
        """What it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().strip().rpartition("\n")[2]
        raise RuntimeError(f"{self._name} ended with {code}: {last}")
