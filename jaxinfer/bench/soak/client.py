"""The clients of a soak: those that wait for their answers, and those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.bench.serve.client import import_aiohttp
from jaxinfer.bench.serve.sse import LineTooLongError, SseParser
from jaxinfer.bench.soak.answers import Answer, WrongAnswer, streamed, whole
from jaxinfer.bench.soak.cases import Case
from jaxinfer.bench.soak.verify import wrong_answer, wrong_error

_KEEP_S = 2.0  # less than servers keep an unused connection, so that none is lost to that race
_CROWD = 12
_STALLED_BUFFER_BYTES = 4096


@dataclass
class Outcome:
    """What became of a case: `result` in a word or two, and what was wrong."""

    case: Case
    result: str
    wrong: list[str] = field(default_factory=list)
    answer: Answer | None = None


class Clients:
    """Connections to one server; `async with` opens and closes them."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float | int = 300):
        self._aiohttp = import_aiohttp()
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._session: Any = None

    async def __aenter__(self) -> Clients:
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S)
        timeout = self._aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = self._aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET.

        Raises:
            RuntimeError: nobody answers.
        """
        try:
            async with self._session.get(self.base_url + path) as response:
                return response.status, await response.text()
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RuntimeError(f"{self.base_url}{path}: {error or type(error).__name__}") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and body of the answer to a JSON body; raises the same."""
        try:
            async with self._session.post(self.base_url + path, json=body) as response:
                return response.status, await response.text()
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RuntimeError(f"{self.base_url}{path}: {error or type(error).__name__}") from error

    async def send(self, case: Case) -> list[Outcome]:
        """Do what the case says. Nothing is raised but cancellation."""
        if case.behaviour in ("stall", "half a body", "garbage"):
            return [await self._raw(case)]
        if case.behaviour == "leave":
            return await self._leave([case], case.pace)
        if case.behaviour == "crowd leaves":
            return await self._leave([case] * _CROWD, case.pace)
        if case.behaviour == "burst":
            return list(await asyncio.gather(*(self._ask(case) for _ in range(int(case.pace)))))
        return [await self._ask(case)]

    async def _leave(self, cases: Sequence[Case], after_s: float) -> list[Outcome]:
        """Ask, and go after a while; who has been answered by then is checked as others are."""
        tasks = [asyncio.create_task(self._ask(case)) for case in cases]
        await asyncio.wait(tasks, timeout=after_s)
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        outcomes = []
        for case, each in zip(cases, found, strict=True):
            if isinstance(each, asyncio.CancelledError):
                outcomes.append(Outcome(case, "left"))
            elif isinstance(each, BaseException):
                raise each
            else:
                outcomes.append(each)
        return outcomes

    async def _ask(self, case: Case) -> Outcome:
        data = io.BytesIO(json.dumps(case.body).encode() if case.raw is None else case.raw)
        request_id = f"soak-{case.index}"
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **(case.headers or {})}
        try:
            async with self._session.request(
                case.method, self.base_url + case.path, data=None if case.method == "GET" else data, headers=headers
            ) as response:
                outcome = await self._read(case, response)
            if response.headers.get("X-Request-Id") != request_id:
                outcome.wrong.append(f"X-Request-Id {response.headers.get('X-Request-Id')!r}, not {request_id!r}")
            return outcome
        except TimeoutError:
            return Outcome(case, "no answer", [f"no answer within {self._timeout_s:g} s"])
        except (self._aiohttp.ClientError, OSError) as error:
            return Outcome(case, "no answer", [f"no answer: {type(error).__name__}: {error}"])
        except (WrongAnswer, LineTooLongError) as error:
            return Outcome(case, "wrong", [str(error)])

    async def _read(self, case: Case, response: Any) -> Outcome:
        if response.status != 200:
            wrong = wrong_error(case, response.status, response.headers, await response.read())
            return Outcome(case, f"HTTP {response.status}", [] if wrong is None else [wrong])
        if not case.stream:
            answer = whole(case.path, await response.read())
        else:
            kind = response.headers.get("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise WrongAnswer(f"a stream of {kind!r}")
            events = await self._events(case, response)
            if events is None:
                return Outcome(case, "aborted")
            answer = streamed(case.path, events)
        return Outcome(case, "answered", list(wrong_answer(case, answer)), answer)

    async def _events(self, case: Case, response: Any) -> list[bytes] | None:
        """A stream's events; None where this client has gone before its end."""
        parser, events = SseParser(), []
        while chunk := await response.content.readany():
            events += parser.feed(chunk)
            if case.behaviour == "abort" and len(events) >= case.pace:
                response.close()
                return None
            if case.behaviour == "slow":
                await asyncio.sleep(case.pace)
        if parser.unfinished:
            raise WrongAnswer("the stream ended within an event")
        return events

    async def _raw(self, case: Case) -> Outcome:
        """Over a socket of its own, which is dropped after a while."""
        loop = asyncio.get_running_loop()
        address = urlsplit(self.base_url)
        client = socket.socket(socket.AF_INET)
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STALLED_BUFFER_BYTES)
        try:
            # Who sends rubbish, or half of something, may be cut off while it does.
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(30):
                    await loop.sock_connect(client, (address.hostname, address.port or 80))
                    await loop.sock_sendall(client, self._bytes(case))
                await asyncio.sleep(case.pace)
                if case.behaviour == "garbage":
                    return Outcome(case, "left", await _refused(loop, client))
        except TimeoutError:
            return Outcome(case, "no answer", ["the server takes no more connections"])
        finally:
            client.close()
        return Outcome(case, "left")

    def _bytes(self, case: Case) -> bytes:
        if case.behaviour == "garbage":
            return b"\x16\x03\x01\x02\x00\x01 what is no HTTP\r\n\r\n"
        data = json.dumps(case.body).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        sent = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        if case.behaviour == "half a body":
            return sent[: int(len(sent) * case.pace)]
        return sent


async def _refused(loop: asyncio.AbstractEventLoop, client: socket.socket) -> list[str]:
    """What is wrong with the answer to rubbish: it is a 400, or the connection is closed."""
    async with asyncio.timeout(30):
        begun = await loop.sock_recv(client, 200)
    return (
        []
        if not begun or begun.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
        else [f"rubbish is answered with {begun[:60]!r}"]
    )
