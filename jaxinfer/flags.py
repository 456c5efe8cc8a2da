"""Flags that commands share, on the command line or in a YAML file; names as vLLM's where they mean the same.

Imports no jax: a command that is called wrongly says so at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class UsageError(ValueError):
    """A flag, or a line of the configuration file, that cannot be used."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` for what it cannot read, where argparse ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the flags")


class Items(argparse.Action):
    """A flag of one or more values, which may be given several times: `--stop a b --stop=--c`.

    Those of the command line replace those of the file.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        super().__init__(option_strings, dest, nargs="+", **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        held = getattr(namespace, self.dest, None)
        earlier = [] if held is None or held is self.default else held
        setattr(namespace, self.dest, [*earlier, *values])


def size_bytes(text: str) -> int:
    """A size such as 500000, 8M or 1g, in bytes."""
    number, unit = (text[:-1], text[-1:].lower()) if text[-1:].isalpha() else (text, "")
    if unit not in _SIZES or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500000, 800k or 8M")
    return int(number) * _SIZES[unit]


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def json_object(text: str) -> dict[str, Any]:
    """A flag's JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r:.200} is no JSON object such as {{"batch": 0.5}}')
    return found


def chat_template_source(given: str | None) -> str | None:
    """What `--chat-template` names: a file, or the source itself, which has braces.

    Raises:
        UsageError: the file cannot be read.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {given}: {error}") from None


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """`--config`, for `parse_with_config`."""
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file of these flags, by their names without the dashes"
    )


def add_model_flags(group: Any) -> None:
    """To a parser or a group of it: what `LLM` is told of the model, by the names of its arguments."""
    group.add_argument("--model", help="a GGUF file, a Hugging Face folder or id, or a converted checkpoint")
    group.add_argument("--tokenizer", help="a folder, file or hub id; the model's own by default")
    group.add_argument("--revision", help="of a hub id: branch, tag or commit")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--quantization", help="none is the only value yet")


def served_name(model: str | None, source: str) -> str:
    """What requests call a model without --served-model-name: its id, or its file's or folder's name.

    `source` is `LLM.source`, for a model that is not named.
    """
    if model is not None and "/" in model and not model.startswith((".", "/", "~")) and not Path(model).exists():
        return model
    name = (model or source.removeprefix("model: ")).rstrip("/").split("/")[-1].split(" ")[0]
    return name.removesuffix(".gguf") or "default"


def add_engine_flags(group: Any) -> None:
    """To a parser or a group of it: the other settings of `LLM`, by the names of its arguments, with its defaults.

    All but `tenant_weights`, which mean something where there are tenants.
    """
    group.add_argument("--max-model-len", type=_length, metavar="TOKENS", help="prompt and output together, or auto")
    group.add_argument("--max-num-seqs", type=int, default=32, metavar="N", help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="TOKENS", help="of one step")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--kv-cache-dtype", default="auto")
    group.add_argument("--block-size", "--page-size", dest="page_size", type=int, default=16, metavar="TOKENS")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages of the cache; planned by default")
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=None)
    group.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument(
        "--logits-processors",
        action=Items,
        default=(),
        metavar="MODULE:NAME",
        help="jaxinfer.LogitsProcessor objects that requests may switch on; their modules are imported",
    )
    group.add_argument("--compilation-cache", metavar="FOLDER", help="for compiled programs; the user's by default")
    group.add_argument("--seed", type=int, default=0)


def load_processors(places: Sequence[str]) -> tuple[Any, ...]:
    """The objects that `--logits-processors` names as `package.module:NAME`; imports their modules, and so jax.

    Raises:
        UsageError: a place that names nothing, or something else than a logits processor.
    """
    return tuple(_load_processor(place) for place in places)


def _load_processor(place: str) -> Any:
    from jaxinfer import LogitsProcessor

    flag = f"--logits-processors {place}"
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{flag}: write package.module:NAME")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{flag}: {error}") from None
    if not isinstance(found, LogitsProcessor):
        raise UsageError(f"{flag}: it is a {type(found).__name__}, no jaxinfer.LogitsProcessor")
    return found


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The values of flags; those of the command line go before those of the file that `--config` names.

    Raises:
        UsageError: a flag or line that is unknown or has no such value.
        SystemExit: after --help.
    """
    given, _ = parser.parse_known_args(argv)
    if given.config is not None:
        parser.set_defaults(**_of_file(parser, given.config))
    return parser.parse_args(argv)


def _of_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """The lines of a configuration file, checked as the flags are."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(f"--config {path}: reading it needs PyYAML; pip install pyyaml") from None
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
        values[dest] = _one(parser, actions[dest], value, path)
    return values


def _one(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, path: str) -> Any:
    """What the flag of `action` gives for a value of the file."""
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: {flag[2:]}: {value!r} must be true or false")
        words = [flag if value else f"--no-{flag[2:]}"]
    elif isinstance(value, dict):
        words = [f"{flag}={json.dumps(value)}"]
    elif isinstance(value, list) and isinstance(action, Items) and value:
        words = [f"{flag}={each}" for each in value]
    elif isinstance(value, list):
        words = [flag, *map(str, value)]
    else:
        words = [f"{flag}={value}"]
    try:
        found = parser.parse_args(words)
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from None
    return getattr(found, action.dest)
