"""The tokenizer that the engine, the doors and the server share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxinfer.tokenizer.chat_template import ChatTemplateError, check_variables, render_chat_template
from jaxinfer.tokenizer.token_bytes import Family, raw_bytes

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class TokenizerSpec:
    """What is known of a vocabulary besides the `tokenizers` object that encodes with it.

    `added_ids` are the tokens matched in the text before any splitting; `special_ids` those of them (and bos, eos …)
    that `skip_special_tokens` drops. `prefix_ids` and `suffix_ids` are put around the text by
    `add_special_tokens=True`; with `backend_adds_special` the `tokenizers` post-processor does it instead.
    `strip_leading_space` removes one space from the front of decoded text, the one that encoding had put there.
    `chat_templates` holds the templates by name; "default" is the one used unless a call names another.
    `special_tokens` are the named strings (`bos_token` …) that templates read.
    """

    name: str
    family: Family
    added_ids: frozenset[int]
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    backend_adds_special: bool = False
    strip_leading_space: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Encodes, decodes and renders chats. Build one with `load_tokenizer` or `tokenizer_from_gguf`.

    Decoding joins the tokens' bytes and reads them as UTF-8; each maximal ill-formed sequence becomes U+FFFD. Ids in
    the padding of a model's vocabulary, beyond the tokenizer's own, decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spec: TokenizerSpec,
        vocab_size: int,
        id_to_token: Callable[[int], str | None],
    ) -> None:
        """`id_to_token` gives a vocabulary entry as it is spelled in the vocabulary, or None for an unused id."""
        self._backend = backend
        self._spec = spec
        self._id_to_token = id_to_token
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self._spec.name!r}, {self._spec.family.value}, vocab_size={self.vocab_size}, "
            f"bos_token_id={self.bos_token_id}, eos_token_ids={self.eos_token_ids}, "
            f"chat_template={'yes' if self.chat_template else 'no'})"
        )

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def name(self) -> str:
        """Where the tokenizer came from, for messages."""
        return self._spec.name

    @property
    def spec(self) -> TokenizerSpec:
        """What is known of the vocabulary besides the object that encodes with it."""
        return self._spec

    @property
    def family(self) -> Family:
        """How the vocabulary spells bytes."""
        return self._spec.family

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object underneath, for libraries that build on it."""
        return self._backend

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token, if the model has one."""
        return self._spec.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if the model has one."""
        return self._spec.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation; `eos_token_id` comes first."""
        return self._spec.eos_token_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens=True` leaves out."""
        return self._spec.special_ids

    @property
    def strip_leading_space(self) -> bool:
        """Whether decoding removes one space from the front (SentencePiece with a space prefix)."""
        return self._spec.strip_leading_space

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja source), if it brings one."""
        return self._spec.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens spelled in the text (`<|im_start|>`) become their one id.

        `add_special_tokens` puts the model's bos/eos around it, where the model wants them.

        Raises:
            TypeError: `text` is not a string.
            ValueError: `text` holds lone surrogates, which are no Unicode text.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode: text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"encode: text has a lone surrogate at position {error.start}; remove it") from None
        spec = self._spec
        backend_adds = add_special_tokens and spec.backend_adds_special
        # As a batch of one, since `encode` keeps Python's lock while it runs: seconds, of a long text, for all threads.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=backend_adds)[0].ids
        if add_special_tokens and not spec.backend_adds_special:
            return [*spec.prefix_ids, *ids, *spec.suffix_ids]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`.

        Raises:
            ValueError: an id is negative or no integer.
        """
        skipped = self._spec.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        text = data.decode("utf-8", "replace")
        return text[1:] if self._spec.strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """The raw bytes of one token; empty for an id that the vocabulary does not use.

        Raises:
            ValueError: the id is negative or no integer.
        """
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes_of(id)
            if id < self.vocab_size:
                self._bytes[id] = found
        return found

    def token_text(self, id: int) -> str:
        """The text of one token alone, as shown beside its log-probability; partial characters become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _bytes_of(self, id: int) -> bytes:
        try:
            token_id = index(id)
        except TypeError:
            raise ValueError(f"token id {id!r} is not an integer") from None
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids are 0 to {self.vocab_size - 1}")
        token = self._id_to_token(token_id) if token_id < self.vocab_size else None
        return b"" if token is None else raw_bytes(token, self._spec.family, token_id in self._spec.added_ids)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tokenize: Literal[True] = True,
        **template_kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tokenize: Literal[False],
        **template_kwargs: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Render a conversation with the model's chat template, or with `chat_template`.

        Args:
            messages: dicts with "role" and "content"; a content that is a list of text parts is joined by newlines.
            tools: JSON schemas of functions, in the OpenAI form.
            add_generation_prompt: end with the header that makes the model answer.
            chat_template: Jinja source, or the name of one of the model's own templates.
            continue_final_message: end inside the last message, so that the model continues it; needs
                `add_generation_prompt=False`.
            tokenize: return token ids rather than text.
            template_kwargs: further variables for the template (`enable_thinking` …).

        Raises:
            ChatTemplateError: (a ValueError) there is no template, it failed or ran too long, or it reads no variable
                that a name in `template_kwargs` could set.
            TypeError: `messages` or `tools` have the wrong type.
        """
        source = self._choose_template(chat_template, tools)
        check_variables(source, template_kwargs)
        text = render_chat_template(
            source,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._spec.special_tokens, **template_kwargs},
        )
        # The template writes bos itself where the model wants it.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _choose_template(self, chat_template: str | None, tools: Any) -> str:
        templates = self._spec.chat_templates
        if chat_template is not None:
            return templates.get(chat_template, chat_template)
        if tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        others = sorted(templates)
        named = f"; it has templates named {others}, choose with chat_template=NAME" if others else ""
        raise ChatTemplateError(
            f"{self._spec.name}: the model brings no chat template{named}. Pass one as chat_template=SOURCE (Jinja), "
            "or give a plain prompt in place of messages"
        )
