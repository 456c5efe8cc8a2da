"""Text to token ids and back, over the `tokenizers` library: byte-level BPE from `tokenizer.json` or a GGUF file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {  # name in GGUF metadata → (each digit on its own first, pattern)
    "default": (False, _GPT2),
    "gpt-2": (False, _GPT2),
    "smollm": (True, _GPT2),
    "llama-bpe": (False, _LLAMA3),
    "llama3": (False, _LLAMA3),
    "qwen2": (False, _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_MAX_PROMPT_CHARS = 16_000_000


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from the printable characters that stand for bytes in a vocabulary to those bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens and chat template."""

    def __init__(
        self,
        backend: Any,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool = False,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self.chat_template = chat_template
        self._add_bos = add_bos
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added = {id: token.content for id, token in added.items()}
        self._alphabet = _byte_alphabet()

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos_token_ids={self.eos_token_ids})"

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self._add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else bytes(self._alphabet[char] for char in token)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        kept = (id for id in ids if not (skip_special_tokens and id in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, written as the model's own template has it.

        Raises:
            ValueError: the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use generate() with a prompt of your own")
        text = _render(self.chat_template, messages, add_generation_prompt, self, variables)
        return self.encode(text, add_special_tokens=False)


def _render(template: str, messages: Any, add_generation_prompt: bool, tokenizer: Tokenizer, variables: dict) -> str:
    """Render in Jinja's sandbox: a template comes with a model's files and is not trusted."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)

    def name(token_id: int | None) -> str:
        return "" if token_id is None else tokenizer.token_text(token_id)

    known = {"bos_token": name(tokenizer.bos_token_id), "eos_token": name(tokenizer.eos_token_id)}
    try:
        pieces, size = [], 0
        for piece in environment.from_string(template).generate(
            messages=messages, add_generation_prompt=add_generation_prompt, **known, **variables
        ):
            size += len(piece)
            if size > _MAX_PROMPT_CHARS:
                raise ValueError(f"the chat template wrote more than {_MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
    except (TemplateError, TypeError, OverflowError) as error:
        raise ValueError(f"the chat template refused these messages: {error}") from error
    return "".join(pieces)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        ValueError: a key that is missing, a model other than byte-level BPE, or an unknown pre-tokenizer name.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    def get(key: str) -> Any:
        if f"tokenizer.ggml.{key}" not in metadata:
            raise ValueError(f"GGUF metadata: tokenizer.ggml.{key} is missing")
        return metadata[f"tokenizer.ggml.{key}"]

    if get("model") != "gpt2":
        raise ValueError(f"GGUF metadata: tokenizer.ggml.model={get('model')!r} is not supported (gpt2 is)")
    pre_name = metadata.get("tokenizer.ggml.pre", "default")
    if pre_name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF metadata: tokenizer.ggml.pre={pre_name!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens = get("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in get("merges")]
    backend = Backend(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    digits, pattern = _PRE_TOKENIZERS[pre_name]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added])
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return Tokenizer(
        backend,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ValueError: no `tokenizer.json`, or one that is not byte-level BPE.
    """
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: a model folder needs its tokenizer.json")
    backend = Backend.from_file(str(path))
    if type(backend.decoder).__name__ != "ByteLevel":
        raise ValueError(f"{path}: only byte-level BPE is supported, not {type(backend.decoder).__name__}")

    def read(name: str) -> dict[str, Any]:
        file = folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    settings = read("tokenizer_config.json")

    def special(name: str) -> int | None:
        token = settings.get(f"{name}_token")
        return None if token is None else backend.token_to_id(token["content"] if isinstance(token, dict) else token)

    eos = read("generation_config.json").get("eos_token_id", special("eos"))
    template_file = folder / "chat_template.jinja"
    return Tokenizer(
        backend,
        bos_token_id=special("bos"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        add_bos=bool(settings.get("add_bos_token", False)),
        chat_template=template_file.read_text() if template_file.is_file() else settings.get("chat_template"),
    )


class IncrementalDetokenizer:
    """Text as tokens arrive: what it returns is final and, joined, equals the whole decode."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete; bytes of an unfinished character are held back."""
        kept = (id for id in token_ids if id not in self._skipped)
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, kept)))

    def finish(self) -> str:
        """What was held back; an unfinished character is U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        self._stops = stops
        self._include = include_in_output
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string found: the one that begins earliest, of those the longest."""
        self._held += text
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            start, _, stop = min(found)
            return self._held[: start + len(stop) if self._include else start], stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, None

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
