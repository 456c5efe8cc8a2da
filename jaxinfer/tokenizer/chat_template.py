"""Chat templates: Jinja source that turns a conversation into a prompt.

Rendered as Hugging Face's libraries do (trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now`,
`{% generation %}`), in Jinja's immutable sandbox and under the limits of `template_limits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARACTERS = 1 << 18
# Marks the end of the last message while its continuation is cut out; invisible separators, in no model's text.
_CONTINUE_MARK = "\u2063\u2064jaxinfer:continue\u2064\u2063"


class ChatTemplateError(ValueError):
    """A chat template is missing, broken, refused the conversation, or exceeded a limit."""


def render_chat_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that the template `source` makes of `messages`.

    Args:
        source: Jinja source, at most 256 K characters.
        messages: dicts with "role" and "content". A content that is a list of text parts is joined by newlines.
        tools: JSON schemas of functions.
        add_generation_prompt: end with the header of the model's answer.
        continue_final_message: end right after the last message's content, without the marks that close it.
        variables: further variables (`bos_token`, `enable_thinking` …).

    Raises:
        ChatTemplateError: the template is malformed, raises an exception, writes more than 16 M characters, does more
            than 64 M characters' worth of work, or takes more than 10 s.
        TypeError: `messages` or `tools` are not lists of dicts.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message and add_generation_prompt exclude each other; pass add_generation_prompt=False"
        )
    chat = _plain_messages(messages)
    if tools is not None and not _is_list_of_dicts(tools):
        raise TypeError("tools: expected a list of dicts (JSON schemas of functions)")
    if continue_final_message:
        _mark_end(chat)
    text = _render(
        source,
        {
            **(variables or {}),
            "messages": chat,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        },
    )
    if not continue_final_message:
        return text
    end = text.rfind(_CONTINUE_MARK)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves the last message's content out, so there is nothing to "
            "continue"
        )
    return text[:end].replace(_CONTINUE_MARK, "")


def _is_list_of_dicts(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(item, Mapping) for item in value)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not _is_list_of_dicts(messages):
        raise TypeError('messages: expected a list of dicts such as {"role": "user", "content": "…"}')
    if not messages:
        raise ChatTemplateError("messages: the list is empty; give at least one message")
    chat = [dict(message) for message in messages]
    for number, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f'messages[{number}]: has no "role"; it is "system", "user", "assistant" or "tool"')
        if "content" in message:
            message["content"] = _join_text_parts(message["content"])
    return chat


def _join_text_parts(content: Any) -> Any:
    """A list of text parts as one string; other contents are the template's business."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "\n".join(text for text in texts if text is not None) if all(isinstance(t, str) for t in texts) else content


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise ChatTemplateError("continue_final_message: the last message's content is not text")
    chat[-1]["content"] = content + _CONTINUE_MARK


def _render(source: str, variables: dict[str, Any]) -> str:
    import jinja2

    from jaxinfer.tokenizer.template_limits import MAX_OUTPUT_CHARACTERS, METER, Meter

    token = METER.set(Meter())
    template: jinja2.Template | None = None
    try:
        template = _compile(source)
        pieces: list[str] = []
        num_characters = 0
        for piece in template.generate(variables):
            num_characters += len(piece)
            if num_characters > MAX_OUTPUT_CHARACTERS:
                raise ChatTemplateError(f"chat template: it writes more than {MAX_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    except ChatTemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template: {error.message}") from None
    except (RecursionError, MemoryError):
        raise ChatTemplateError("chat template: it is nested too deeply, or needs too much memory") from None
    except Exception as error:  # what templates raise is whatever Python raises
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from None
    finally:
        METER.reset(token)


def _raise_exception(message: Any) -> NoReturn:
    """What templates call to refuse a conversation."""
    from jaxinfer.tokenizer.template_limits import measure

    measure(message)
    raise ChatTemplateError(f"chat template refuses the conversation: {str(message)[:1000]}")


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(f"chat template: its source has more than {MAX_TEMPLATE_CHARACTERS} characters")
    return _environment().from_string(source)


def check_variables(source: str, variables: Mapping[str, Any]) -> None:
    """Raise `ChatTemplateError` for a variable that the template `source` never reads: it would change nothing."""
    for name, value in variables.items():
        if name not in _variables_of(source):
            raise ChatTemplateError(f"{name}={value!r:.60}: the chat template reads no such variable")


@lru_cache(maxsize=16)
def _variables_of(source: str) -> frozenset[str]:
    """The names that a template takes from outside; none for one that does not parse, which rendering reports."""
    import jinja2
    from jinja2 import meta

    if len(source) > MAX_TEMPLATE_CHARACTERS:
        return frozenset()
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jaxinfer.tokenizer.template_environment import ChatEnvironment

    environment = ChatEnvironment()
    environment.globals["raise_exception"] = _raise_exception
    return environment
