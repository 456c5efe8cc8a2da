"""How the served model writes: what its chat template does with tools, and what is read out of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.reasoning import (
    REASONING_MARKS,
    REASONING_PARSERS,
    ReasoningSplitter,
    begins_in_reasoning,
    choose_reasoning_parser,
    ends_reasoning,
)
from jaxinfer.serve.reply import ReplyReader
from jaxinfer.serve.tools.constraint import Reasoning, answer_grammar
from jaxinfer.serve.tools.definitions import ToolUse
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS, choose_tool_call_parser, make_tool_call_parser
from jaxinfer.serve.tools.prompt import probe_template, prompt_with_tools
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.messages import template_messages

# Of the prompt, so many last tokens show whether it opens the reasoning.
_TAIL_TOKENS = 32


class Dialect:
    """The parsers of a model's answers and the way of its chat template.

    Args:
        chat_template: in place of the model's own.
        tool_call_parser: a name of `TOOL_CALL_PARSERS`; by the template when None.
        reasoning_parser: a name of `REASONING_PARSERS`, or "none" to leave reasoning in the content; by the template
            when None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            return tokenizer.apply_chat_template(messages, tools=tools, chat_template=chat_template, tokenize=False)

        source = tokenizer.chat_template if chat_template is None else chat_template
        self._tokenizer = tokenizer
        self._special_texts = frozenset(tokenizer.token_text(token) for token in tokenizer.special_ids)
        self._traits = probe_template(render)
        # A template that knows of no tools has the calls written as `prompt_with_tools` asks, which any format may be.
        chosen = choose_tool_call_parser(source if self._traits.knows_tools else None)
        self.tool_call_parser = tool_call_parser or chosen
        chosen = choose_reasoning_parser(source)
        self.reasoning_parser = (chosen or "none") if reasoning_parser is None else reasoning_parser

    def for_template(self, messages: Any, use: ToolUse) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """A request's messages, and tools where the template takes them. Tools that may not be called are not told.

        Raises:
            FieldError: (a ValueError) a message of the wrong form.
        """
        tools = () if use.mode == "none" else use.tools
        layout = TOOL_CALL_PARSERS[self.tool_call_parser].layout
        return prompt_with_tools(template_messages(messages), tools, self._traits, layout)

    def reader(self, use: ToolUse, prompt_ids: list[int]) -> ReplyReader:
        """Reads one answer to a prompt."""
        reasoning = tools = None
        if self.reasoning_parser != "none":
            reasoning = ReasoningSplitter(self.reasoning(prompt_ids) == "opened")
        if use.names:
            tools = make_tool_call_parser(self.tool_call_parser, use.names)
        return ReplyReader(reasoning, tools)

    def has_special_marks(self, use: ToolUse) -> bool:
        """Whether what is looked for in an answer is made of special tokens, which texts leave out by default."""
        marks = () if self.reasoning_parser == "none" else REASONING_MARKS
        if use.names:
            marks += TOOL_CALL_PARSERS[self.tool_call_parser].marks
        return not self._special_texts.isdisjoint(marks)

    def grammar(
        self, use: ToolUse, prompt_ids: list[int], content_schema: Mapping[str, Any] | None = None
    ) -> str | None:
        """What constrains an answer to a prompt, as `answer_grammar` has it."""
        return answer_grammar(use, self.tool_call_parser, self.reasoning(prompt_ids), content_schema)

    def reasoning(self, prompt_ids: list[int]) -> Reasoning:
        """Whether the answer to a prompt begins with reasoning, or may."""
        if self.reasoning_parser == "none":
            return "none"
        tail = self._tail(prompt_ids)
        if begins_in_reasoning(self.reasoning_parser, tail):
            return "opened"
        return "none" if ends_reasoning(tail) else "possible"

    def _tail(self, prompt_ids: list[int]) -> str:
        return self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:])


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ValueError` for a parser that there is not."""
    if tool_call_parser is not None and tool_call_parser not in TOOL_CALL_PARSERS:
        raise ValueError(f"tool_call_parser={tool_call_parser!r}: the parsers are {', '.join(TOOL_CALL_PARSERS)}")
    if reasoning_parser not in (None, "none", *REASONING_PARSERS):
        raise ValueError(f"reasoning_parser={reasoning_parser!r}: the parsers are none, {', '.join(REASONING_PARSERS)}")
