"""`python -m jaxinfer.serve` as a child process on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_START_LIMIT_S = 600.0
_END_LIMIT_S = 60.0
_POLL_S = 0.05
_IDLE_INTERVAL_S, _NUM_IDLE, _IDLE_SHARE = 0.5, 3, 0.04


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Has SIGTERM end this process by `SystemExit`, so that the processes it has started are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say so
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ChildServer:
    """The server, ready when entered and ended when left.

    Args:
        arguments: flags of `python -m jaxinfer.serve` beside `--host` and `--port`.
        command: what is run in its place, for tests.

    Raises:
        RuntimeError: it ended before it was ready, or was not ready in time; the message has its last line.
    """

    def __init__(self, arguments: Sequence[str], command: Sequence[str] | None = None):
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        start = [sys.executable, "-m", "jaxinfer.serve"] if command is None else list(command)
        self._command = [*start, "--host", "127.0.0.1", "--port", str(self.port), *arguments]

    def __enter__(self) -> ChildServer:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def wait_until_idle(self) -> None:
        """Wait until it uses no processor time, and so compiles nothing any more; only Linux tells."""
        deadline_s = time.monotonic() + _START_LIMIT_S
        before_s, num_idle = self.cpu_s(), 0
        while before_s is not None and num_idle < _NUM_IDLE and time.monotonic() < deadline_s:
            time.sleep(_IDLE_INTERVAL_S)
            now_s = self.cpu_s()
            used_s = 0.0 if now_s is None else now_s - before_s
            num_idle = num_idle + 1 if used_s <= _IDLE_SHARE * _IDLE_INTERVAL_S else 0
            before_s = now_s

    def cpu_s(self) -> float | None:
        """Processor time since it began; only Linux tells."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc_pid_stat(5)

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def wait(self, timeout_s: float | int) -> int | None:
        """Its exit code; None where it has not ended by then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """What it has written so far."""
        file = self._log.fileno()  # the server's own position in the file stays
        return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_LIMIT_S
        while _status(self.port, "/ready") != 200:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the server ended with {code} before it was ready: {self._last_line()}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the server was not ready after {_START_LIMIT_S:.0f} s: {self._last_line()}")
            time.sleep(_POLL_S)

    def _last_line(self) -> str:
        return self.log().strip().rpartition("\n")[2] or "it said nothing"

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _status(port: int, path: str) -> int | None:
    """The status of a GET, None where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
