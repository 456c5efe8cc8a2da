"""The flags of `python -m jaxinfer.serve`, on the command line or in a YAML file; names as vLLM's where they mean the
same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxinfer.flags import (
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    add_model_flags,
    chat_template_source,
    json_object,
    load_processors,
    parse_with_config,
    size_bytes,
)
from jaxinfer.phases import LOG_LEVELS
from jaxinfer.serve.config import ServerConfig
from jaxinfer.serve.reasoning import REASONING_PARSERS
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS
from jaxinfer.user_folders import user_folder


@dataclass(frozen=True)
class Settings:
    """What to serve and how: `engine` are the arguments of `AsyncLLM`."""

    model: str | None
    model_names: tuple[str, ...]
    engine: dict[str, Any]
    server: ServerConfig
    log_level: str


def make_parser() -> argparse.ArgumentParser:
    """All flags, with their defaults."""
    parser = Parser(prog="python -m jaxinfer.serve", description="Serve a model over the OpenAI API.")
    add_config_flag(parser)
    model = parser.add_argument_group("model")
    add_model_flags(model)
    model.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it")
    model.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the source itself")
    model.add_argument(
        "--tool-call-parser", choices=TOOL_CALL_PARSERS, help="how the model writes tool calls; by its template"
    )
    model.add_argument(
        "--reasoning-parser", choices=("none", *REASONING_PARSERS), help="how it marks reasoning; by its template"
    )
    model.add_argument("--pooling", choices=("mean", "last"), default="mean", help="of a text's states, for embeddings")
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    engine.add_argument("--tenant-weights", type=json_object, metavar="JSON", help='shares, as {"batch": 0.5}')
    _add_http_flags(parser.add_argument_group("http"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_batch_flags(parser.add_argument_group("batches"))
    _add_log_flags(parser.add_argument_group("logs"))
    return parser


def _add_http_flags(http: Any) -> None:
    http.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    http.add_argument("--api-key", action="append", nargs="+", metavar="KEY", help="or NAME:KEY; clients need one")
    http.add_argument("--api-key-file", metavar="FILE", help="a KEY or NAME:KEY a line")
    http.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="of web pages elsewhere (CORS)"
    )
    http.add_argument("--ssl-keyfile", metavar="FILE")
    http.add_argument("--ssl-certfile", metavar="FILE")


def _add_limit_flags(limits: Any) -> None:
    limits.add_argument("--max-queue-len", type=int, default=256, metavar="N", help="sequences that may wait")
    limits.add_argument("--max-requests-per-tenant", type=int, metavar="N", help="at once")
    limits.add_argument(
        "--max-body-size",
        dest="max_body_bytes",
        type=size_bytes,
        default=8 << 20,
        metavar="SIZE",
        help="of a request: 8M",
    )
    limits.add_argument("--max-stored-responses", type=int, default=1000, metavar="N", help="of /v1/responses; or 0")
    limits.add_argument(
        "--max-responses-size",
        dest="max_responses_bytes",
        type=size_bytes,
        default=64 << 20,
        metavar="SIZE",
        help="of those: 64M",
    )
    limits.add_argument(
        "--request-timeout",
        dest="request_timeout_s",
        type=float,
        metavar="S",
        help="after which a request ends as it stands",
    )
    limits.add_argument(
        "--stream-timeout",
        dest="stream_timeout_s",
        type=float,
        default=60.0,
        metavar="S",
        help="a stream may be left unread",
    )
    limits.add_argument(
        "--drain-timeout", dest="drain_timeout_s", type=float, default=30.0, metavar="S", help="to finish after SIGTERM"
    )


def _add_batch_flags(batches: Any) -> None:
    batches.add_argument("--batch-dir", metavar="FOLDER", help="for files and batches; the user's by default, or none")
    batches.add_argument("--max-batch-seqs", type=int, metavar="N", help="requests of batches at once")
    batches.add_argument(
        "--max-file-size",
        dest="max_file_bytes",
        type=size_bytes,
        default=200 << 20,
        metavar="SIZE",
        help="of a file: 200M",
    )
    batches.add_argument(
        "--max-stored-size",
        dest="max_stored_bytes",
        type=size_bytes,
        default=10 << 30,
        metavar="SIZE",
        help="of all: 10G",
    )


def _add_log_flags(logs: Any) -> None:
    logs.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="of the line that a request gets")
    logs.add_argument(
        "--log-prompts", action=argparse.BooleanOptionalAction, default=False, help="have these lines hold the prompts"
    )
    logs.add_argument("--otlp-traces-endpoint", metavar="URL", help="for spans: http://localhost:4318/v1/traces")


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Flags as settings; those of the command line go before those of the file.

    Raises:
        UsageError: a flag or line that is unknown or has no such value.
        SystemExit: after --help.
    """
    return _settings(parse_with_config(make_parser(), argv))


_OF_SERVER = frozenset(field.name for field in fields(ServerConfig))
_OF_COMMAND = frozenset(("config", "model", "served_model_name", "api_key", "api_key_file", "log_level"))


def _settings(flags: argparse.Namespace) -> Settings:
    """Flags go where a setting has their name: to the server's configuration, else to the engine."""
    given = vars(flags)
    own = {
        "batch_dir": _batch_dir(flags.batch_dir),
        "needs_batch_dir": flags.batch_dir is not None,
        "api_keys": _api_keys(flags),
        "allowed_origins": tuple(flags.allowed_origins),
        "chat_template": chat_template_source(flags.chat_template),
    }
    try:
        server = ServerConfig(**{**{name: value for name, value in given.items() if name in _OF_SERVER}, **own})
    except ValueError as error:
        raise UsageError(str(error)) from None
    engine = {name: value for name, value in given.items() if name not in _OF_SERVER | _OF_COMMAND}
    engine["logits_processors"] = load_processors(flags.logits_processors)
    return Settings(flags.model, tuple(flags.served_model_name or ()), engine, server, flags.log_level)


def _batch_dir(given: str | None) -> Path | None:
    """The folder for files and batches: what is given, or `jaxinfer/serve` in the user's folder for data."""
    if given == "none":
        return None
    folder = Path(given) if given is not None else user_folder("data") / "serve"
    try:
        return folder.expanduser()
    except RuntimeError:  # there is no home folder
        if given is not None:
            raise UsageError(f"--batch-dir {given}: there is no such home folder") from None
        return None


def _api_keys(flags: argparse.Namespace) -> dict[str, str] | None:
    given = [key for keys in flags.api_key or [] for key in keys]
    if flags.api_key_file is not None:
        try:
            lines = Path(flags.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {flags.api_key_file}: {error}") from None
        given += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not given:
            raise UsageError(f"--api-key-file {flags.api_key_file}: it holds no key, so nobody could enter")
    keys: dict[str, str] = {}
    for number, each in enumerate(given):
        owner, colon, key = each.partition(":")
        key, owner = (key, owner) if colon else (each, f"key-{number}")
        if not key or not key.isascii() or any(letter.isspace() for letter in key):
            raise UsageError(f"API key {number + 1} must be one word of ASCII, KEY or NAME:KEY")
        if key in keys:
            raise UsageError(f"API key {number + 1} is given twice")
        keys[key] = owner
    return keys or None
