"""The HTTP client: sends one request, stamps what comes back, and never retries."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.sse import LineTooLongError, SseParser

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
_MAX_ERROR_BYTES = 2000


def import_aiohttp() -> ModuleType:
    """aiohttp, which only the load generator needs.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError("the load generator needs aiohttp: pip install 'jaxinfer[bench]'") from error
    return aiohttp


def normalize_url(url: str) -> str:
    """The URL that ends in `/v1`, whether `url` had it or not.

    Raises:
        ValueError: not an http or https URL.
    """
    if not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
        raise ValueError(f"base-url {url!r}: must begin with http:// or https:// and name a host")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class Client:
    """Connections to one server; `async with` opens and closes them. Proxies of the environment are not used."""

    def __init__(self, base_url: str, endpoint: str, *, api_key: str | None = None, timeout_s: float | int = 600):
        self._aiohttp = import_aiohttp()
        self._base_url = normalize_url(base_url)
        self._url = self._base_url + _PATHS[endpoint]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._timeout_s = timeout_s
        self._session: Any = None

    async def __aenter__(self) -> Client:
        connector = self._aiohttp.TCPConnector(limit=0)
        timeout = self._aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = self._aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The name of the first of `/v1/models`.

        Raises:
            RuntimeError: the server cannot be reached, or its answer is another.
        """
        url = f"{self._base_url}/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise RuntimeError(f"{url} answered {response.status}; give --model, or an --api-key")
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RuntimeError(f"{url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise RuntimeError(f"{url} lists no models; give --model") from error

    async def send(self, body: Mapping[str, Any], record: Record, start_s: float) -> None:
        """Send one streaming request and fill its record; moments count from `start_s` of `time.perf_counter`.

        What goes wrong is in `record.error`; nothing is raised but cancellation.
        """
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            async with self._session.post(self._url, data=data, headers=headers) as response:
                record.status = response.status
                if response.status != 200:
                    record.error = f"HTTP {response.status}"
                    record.detail = _message(await response.content.read(_MAX_ERROR_BYTES))
                    return
                await self._read(response.content, record, start_s)
        except TimeoutError:
            record.error = "timeout"
        except (self._aiohttp.ClientPayloadError, self._aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            record.error, record.detail = "disconnected", str(error)
        except (self._aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "no connection", str(error)
        except StreamError as error:
            record.error, record.detail = error.kind, str(error)

    async def _read(self, content: Any, record: Record, start_s: float) -> None:
        parser, texts = SseParser(), []
        try:
            while chunk := await content.readany():
                now_s = time.perf_counter() - start_s
                for event in parser.feed(chunk):
                    if record.done:
                        raise StreamError("data after [DONE]")
                    if event == b"[DONE]":
                        record.done = True
                    else:
                        take(event, record, texts, now_s)
        except LineTooLongError as error:
            raise StreamError(str(error)) from error
        finally:
            record.text = "".join(texts)
        if parser.unfinished:
            raise StreamError("it ended within an event")


class StreamError(Exception):
    """A stream that breaks the protocol, or in which the server reports an error."""

    def __init__(self, message: str, kind: str = "unreadable stream"):
        super().__init__(message)
        self.kind = kind


def take(event: bytes, record: Record, texts: list[str], now_s: float) -> None:
    """Put one event of the stream, which came at `now_s`, into the record.

    Raises:
        StreamError: it is no JSON object, reports an error, or has fields of the wrong kind.
    """
    try:
        found = json.loads(event)
        if "error" in found:
            raise StreamError(_message(event), "error in the stream")
        for choice in found.get("choices") or ():
            text, reason = _text(choice), choice.get("finish_reason")
            if not isinstance(reason, str | None):
                raise TypeError("finish_reason is no text")
            if text or reason:
                record.first_s = now_s if record.first_s is None else record.first_s
                record.last_s = now_s
                record.finish_reason = reason or record.finish_reason
            if text:
                texts.append(text)
                record.text_s.append(now_s)
            if (num := _num_logprobs(choice)) is not None:
                record.counted_tokens = (record.counted_tokens or 0) + num
        if usage := found.get("usage"):
            record.prompt_tokens = _count(usage, "prompt_tokens")
            record.output_tokens = _count(usage, "completion_tokens")
            record.total_tokens = _count(usage, "total_tokens")
            record.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")
    except (AttributeError, TypeError, RecursionError) as error:
        raise StreamError(f"an event of another form: {event[:200]!r}") from error
    except ValueError as error:  # of json, and of UTF-8
        raise StreamError(f"an event that is not JSON: {event[:200]!r}") from error


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and type(value) is not int:
        raise TypeError(f"{name} is no number of tokens")
    return value


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a completion's or a chat's chunk, reasoning and the arguments of tool calls included."""
    delta = choice.get("delta") or {}
    calls = [(call.get("function") or {}).get("arguments") or "" for call in delta.get("tool_calls") or ()]
    parts = [choice.get("text"), delta.get("reasoning_content"), delta.get("content"), *calls]
    return "".join(part or "" for part in parts)


def _num_logprobs(choice: Mapping[str, Any]) -> int | None:
    logprobs = choice.get("logprobs")
    if not logprobs:
        return None
    tokens = logprobs.get("tokens", logprobs.get("content"))
    return None if tokens is None else len(tokens)


def _message(data: bytes) -> str:
    """The message of an error in OpenAI's form, else the beginning of what came."""
    try:
        return str(json.loads(data)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return data.decode("utf-8", "replace")[:300]
