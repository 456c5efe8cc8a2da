"""What the server is told beside the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.serve.dialect import check_parsers


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP side; times in seconds, sizes in bytes.

    max_queue_len: sequences that may wait beside the `max_num_seqs` that run; more are answered 429.
    max_requests_per_tenant: requests of one tenant at once; None for no limit of its own.
    request_timeout_s: after which a request ends with what it has; None for none.
    stream_timeout_s: how long a client may leave a stream unread.
    max_stored_responses, max_responses_bytes: of `/v1/responses`, kept in memory for requests that go on from them; 0
        keeps none.
    drain_timeout_s: how long what runs may go on after SIGTERM.
    pooling: "mean" or "last", how embeddings are made of a text's tokens where requests do not say.
    batch_dir: where files and batches are kept; None for nowhere, and they are refused. Where it cannot be used, that
        is an error if `needs_batch_dir`, and else the same as None.
    max_batch_seqs: requests of batches at once in the engine; None is as many as sequences run at once.
    max_file_bytes, max_stored_bytes: of one file, and of all files and results under `batch_dir`.
    log_format: of the access log: "text" for key=value, "json" for a JSON object a line.
    log_prompts: whether the access log holds prompts.
    otlp_traces_endpoint: URL that spans go to, by OTLP over HTTP; None for no traces.
    tool_call_parser, reasoning_parser: how answers are read; by the chat template when None, see `Dialect`.
    api_keys: name of each key's owner by key; who they are decides fairness. Empty where no key is needed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_queue_len: int = 256
    max_requests_per_tenant: int | None = None
    max_body_bytes: int = 8 << 20
    request_timeout_s: float | None = None
    stream_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    pooling: Literal["mean", "last"] = "mean"
    batch_dir: Path | None = None
    needs_batch_dir: bool = True
    max_batch_seqs: int | None = None
    max_file_bytes: int = 200 << 20
    max_stored_bytes: int = 10 << 30
    max_stored_responses: int = 1000
    max_responses_bytes: int = 64 << 20
    api_keys: dict[str, str] | None = None
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_format: str = "text"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be from 0, which takes a free one, up to 65535")
        for name in ("max_queue_len", "max_body_bytes", "max_batch_seqs", "max_file_bytes", "max_stored_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("max_stored_responses", "max_responses_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.max_requests_per_tenant is not None and self.max_requests_per_tenant < 1:
            raise ValueError(f"max_requests_per_tenant={self.max_requests_per_tenant} must be at least 1")
        for name in ("request_timeout_s", "stream_timeout_s", "drain_timeout_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name}={value} must be a number of seconds above 0")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format={self.log_format!r} must be text or json")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together: give both or neither")
