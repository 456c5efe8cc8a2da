"""What a model's template and vocabulary say about how it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.serve.dialect import Dialect, check_parsers
from jaxinfer.serve.tools.definitions import ToolUse, read_tool_use
from jaxinfer.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny-llama"
USE = read_tool_use([{"type": "function", "function": {"name": "f"}}])
TOLD = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer(folder: Path, template: str | None, *special: str) -> Tokenizer:
    """The tiny model's, with another template and more special tokens."""
    found: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    first = 1 + max([*found["model"]["vocab"].values(), *(each["id"] for each in found["added_tokens"])])
    for id, text in enumerate(special, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        found["added_tokens"].append({"id": id, "content": text, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(found))
    settings = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, "hermes", "none"),
        ("{{ messages }}", "hermes", "none"),
        (TOLD + "<|python_tag|>", "llama", "none"),
        # The prompt asks for Hermes's form where the template writes no tools.
        ("{{ messages[0].content }}<|python_tag|>", "hermes", "none"),
        (TOLD + "<think>", "hermes", "think"),
    ],
)
def test_the_template_chooses_the_parsers(tmp_path: Path, template: str | None, tools: str, reasoning: str) -> None:
    dialect = Dialect(tokenizer(tmp_path, template))
    assert (dialect.tool_call_parser, dialect.reasoning_parser) == (tools, reasoning)
    named = Dialect(tokenizer(tmp_path, template), None, "llama", "deepseek_r1")
    assert (named.tool_call_parser, named.reasoning_parser) == ("llama", "deepseek_r1")


def test_marks_that_are_special_tokens_are_known(tmp_path: Path) -> None:
    plain = Dialect(tokenizer(tmp_path, "<think>"))
    assert not plain.has_special_marks(USE)
    calls = Dialect(tokenizer(tmp_path, "<think>", "<tool_call>"))
    assert calls.has_special_marks(USE) and not calls.has_special_marks(ToolUse())
    thoughts = tokenizer(tmp_path, "<think>", "</think>")
    assert Dialect(thoughts).has_special_marks(ToolUse())
    assert not Dialect(thoughts, reasoning_parser="none").has_special_marks(USE)


def test_what_the_prompt_says_of_reasoning(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, "<think>")
    dialect = Dialect(found)
    for prompt, reasoning in (("a", "possible"), ("a<think>\n", "opened"), ("a<think>\n\n</think>\n\n", "none")):
        assert dialect.reasoning(found.encode(prompt, False)) == reasoning
    assert Dialect(found, reasoning_parser="deepseek_r1").reasoning(found.encode("a", False)) == "opened"
    assert Dialect(found, reasoning_parser="none").reasoning(found.encode("a<think>", False)) == "none"


def test_parsers_that_there_are_not() -> None:
    check_parsers("hermes", "none")
    with pytest.raises(ValueError, match="tool_call_parser='x': the parsers are hermes"):
        check_parsers("x", None)
    with pytest.raises(ValueError, match="reasoning_parser='x': the parsers are none, think"):
        check_parsers(None, "x")
