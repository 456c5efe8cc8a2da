"""The flags of `python -m jaxinfer.serve`, on the command line or in a YAML file; names as vLLM's where they mean the
same."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from jaxinfer.phases import LOG_LEVELS
from jaxinfer.serve.config import ServerConfig
from jaxinfer.serve.reasoning import REASONING_PARSERS
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS
from jaxinfer.user_folders import user_folder

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class UsageError(ValueError):
    """A flag, or a line of the configuration file, that cannot be used."""


@dataclass(frozen=True)
class Settings:
    """What to serve and how: `engine` are the arguments of `AsyncLLM`."""

    model: str | None
    model_names: tuple[str, ...]
    engine: dict[str, Any]
    server: ServerConfig
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the flags")


def size_bytes(text: str) -> int:
    """A size such as 500000, 8M or 1g, in bytes."""
    number, unit = (text[:-1], text[-1:].lower()) if text[-1:].isalpha() else (text, "")
    if unit not in _SIZES or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500000, 800k or 8M")
    return int(number) * _SIZES[unit]


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _weights(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"batch": 0.5}}')
    return found


def make_parser() -> argparse.ArgumentParser:
    """All flags, with their defaults."""
    parser = _Parser(prog="python -m jaxinfer.serve", description="Serve a model over the OpenAI API.")
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file of these flags, by their names without the dashes"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="a GGUF file, a Hugging Face folder or id, or a converted checkpoint")
    model.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it")
    model.add_argument("--tokenizer", help="a folder, file or hub id; the model's own by default")
    model.add_argument("--revision", help="of a hub id: branch, tag or commit")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    model.add_argument("--quantization", help="none is the only value yet")
    model.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the source itself")
    model.add_argument(
        "--tool-call-parser", choices=TOOL_CALL_PARSERS, help="how the model writes tool calls; by its template"
    )
    model.add_argument(
        "--reasoning-parser", choices=("none", *REASONING_PARSERS), help="how it marks reasoning; by its template"
    )
    model.add_argument("--pooling", choices=("mean", "last"), default="mean", help="of a text's states, for embeddings")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=_length, metavar="TOKENS", help="prompt and output together, or auto")
    engine.add_argument("--max-num-seqs", type=int, default=32, metavar="N", help="sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="TOKENS", help="of one step")
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    engine.add_argument("--kv-cache-dtype", default="auto")
    engine.add_argument("--block-size", "--page-size", dest="page_size", type=int, default=16, metavar="TOKENS")
    engine.add_argument("--num-pages", type=int, metavar="N", help="pages of the cache; planned by default")
    engine.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    engine.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=None)
    engine.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    engine.add_argument("--tenant-weights", type=_weights, metavar="JSON", help='shares, as {"batch": 0.5}')
    engine.add_argument("--compilation-cache", metavar="FOLDER", help="for compiled programs; the user's by default")
    engine.add_argument("--seed", type=int, default=0)
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    http.add_argument("--api-key", action="append", nargs="+", metavar="KEY", help="or NAME:KEY; clients need one")
    http.add_argument("--api-key-file", metavar="FILE", help="a KEY or NAME:KEY a line")
    http.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="of web pages elsewhere (CORS)"
    )
    http.add_argument("--ssl-keyfile", metavar="FILE")
    http.add_argument("--ssl-certfile", metavar="FILE")
    limits = parser.add_argument_group("limits")
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
    batches = parser.add_argument_group("batches")
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
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="of the line that a request gets")
    logs.add_argument(
        "--log-prompts", action=argparse.BooleanOptionalAction, default=False, help="have these lines hold the prompts"
    )
    logs.add_argument("--otlp-traces-endpoint", metavar="URL", help="for spans: http://localhost:4318/v1/traces")
    return parser


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Flags as settings; those of the command line go before those of the file.

    Raises:
        UsageError: a flag or line that is unknown or has no such value.
        SystemExit: after --help.
    """
    parser = make_parser()
    given, _ = parser.parse_known_args(argv)
    if given.config is not None:
        parser.set_defaults(**_of_file(parser, given.config))
    return _settings(parser.parse_args(argv))


def _of_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """The lines of a configuration file, checked as the flags are."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path}: it must map flags to values, as 'max-model-len: 2048'")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    names = {name.lstrip("-").replace("-", "_"): a.dest for a in actions.values() for name in a.option_strings}
    values: dict[str, Any] = {}
    for key, value in found.items():
        dest = names.get(str(key).replace("-", "_"))
        if dest is None or str(key).replace("-", "_").startswith("no_"):
            raise UsageError(f"--config {path}: {key!r} is no flag; --help lists them")
        values.update(vars(_one(parser, actions[dest], value, path)))
    return {name: value for name, value in values.items() if value is not None}


def _one(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, path: str) -> argparse.Namespace:
    """What the flag of `action` gives for a value of the file."""
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: {flag[2:]}: {value!r} must be true or false")
        words = [flag if value else f"--no-{flag[2:]}"]
    elif isinstance(value, dict):
        words = [f"{flag}={json.dumps(value)}"]
    elif isinstance(value, list):
        words = [flag, *map(str, value)]
    else:
        words = [f"{flag}={value}"]
    try:
        found = parser.parse_args(words)
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from None
    return argparse.Namespace(**{action.dest: getattr(found, action.dest)})


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
        "chat_template": _template(flags.chat_template),
    }
    try:
        server = ServerConfig(**{**{name: value for name, value in given.items() if name in _OF_SERVER}, **own})
    except ValueError as error:
        raise UsageError(str(error)) from None
    engine = {name: value for name, value in given.items() if name not in _OF_SERVER | _OF_COMMAND}
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


def _template(given: str | None) -> str | None:
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {given}: {error}") from None
