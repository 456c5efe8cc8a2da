"""The tool-call formats by name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxinfer.serve.tools.hermes import HermesParser
from jaxinfer.serve.tools.llama import LlamaParser
from jaxinfer.serve.tools.parser import ToolCallParser, new_call_id

# As `--tool-call-parser` takes them; vLLM's names are understood too.
TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama": LlamaParser,
    "llama3_json": LlamaParser,
}


def choose_tool_call_parser(chat_template: str | None) -> str:
    """The format that a model with this template writes: "llama" where the template shows it, else "hermes"."""
    if chat_template is None or "<tool_call>" in chat_template:
        return "hermes"
    return "llama" if "python_tag" in chat_template or '"parameters"' in chat_template else "hermes"


def make_tool_call_parser(
    format: str, names: Collection[str], make_id: Callable[[], str] = new_call_id
) -> ToolCallParser:
    """A parser for one answer in which the functions `names` may be called.

    Raises:
        ValueError: there is no such format.
    """
    if format not in TOOL_CALL_PARSERS:
        raise ValueError(f"tool_call_parser={format!r:.60}: the parsers are {', '.join(TOOL_CALL_PARSERS)}")
    return TOOL_CALL_PARSERS[format](names, make_id)
