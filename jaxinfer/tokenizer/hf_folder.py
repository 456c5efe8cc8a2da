"""Tokenizers from Hugging Face folders (tokenizer.json and its companions), hub ids and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.tokenizer.files import GGUF_METADATA_NAME, gguf_metadata, is_gguf
from jaxinfer.tokenizer.gguf_vocab import tokenizer_from_gguf
from jaxinfer.tokenizer.token_bytes import Family
from jaxinfer.tokenizer.tokenizer import Tokenizer, TokenizerSpec

if TYPE_CHECKING:
    import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# These classes put bos and eos themselves, as the config says, whatever tokenizer.json's post-processor does.
_CLASSES_ADDING_BOS = ("Llama", "CodeLlama", "Gemma", "Cohere")


def load_tokenizer(source: Path | str, *, revision: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: a folder with `tokenizer.json` (and, where present, `tokenizer_config.json`,
            `special_tokens_map.json`, `generation_config.json`, `chat_template.jinja`), that file itself, a GGUF file,
            a converted checkpoint, or a hub id ("owner/name").
        revision: the hub revision; only for hub ids.

    Raises:
        ValueError: nothing usable there, or a malformed file; the message names it.
    """
    path = Path(source).expanduser()
    if not path.exists():
        from jaxinfer.checkpoint.hub import resolve_tokenizer

        path = resolve_tokenizer(str(source), revision=revision)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} applies to hub ids, and {path} is a local path; leave it out")
    if is_gguf(path):
        return tokenizer_from_gguf(gguf_metadata(path), path.name)
    if (path / GGUF_METADATA_NAME).is_file():
        return tokenizer_from_gguf(_read_json(path / GGUF_METADATA_NAME), str(path))
    return _load_folder(path if path.is_dir() else path.parent, path if path.is_file() else path / "tokenizer.json")


def _load_folder(folder: Path, file: Path) -> Tokenizer:
    import tokenizers

    if not file.is_file():
        hint = (
            "tokenizer.model alone is not read: save it once with transformers' save_pretrained, which writes "
            "tokenizer.json"
            if (folder / "tokenizer.model").is_file()
            else "give the folder of a Hugging Face model, or its tokenizer.json, as tokenizer="
        )
        raise ValueError(f"{file}: no such file; {hint}")
    description = _read_json(file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{file}: not a tokenizer of the `tokenizers` library: {error}") from None
    # Files may ask for padding to, or cutting at, a training length.
    backend.no_padding()
    backend.no_truncation()
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    spec = _spec(backend, description, config, folder, file)
    return Tokenizer(backend, spec, _vocab_size(backend), backend.id_to_token)


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id, since files may leave gaps."""
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _spec(
    backend: tokenizers.Tokenizer, description: Mapping[str, Any], config: Mapping[str, Any], folder: Path, file: Path
) -> TokenizerSpec:
    family, strip_leading_space = _decoding(description, file)
    added = backend.get_added_tokens_decoder()
    strings = {name: text for name in _NAMED_TOKENS if (text := _token_string(config.get(name))) is not None}
    bos = backend.token_to_id(strings.get("bos_token", ""))
    eos = backend.token_to_id(strings.get("eos_token", ""))
    generation = _read_json(folder / "generation_config.json")
    listed = generation.get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    if not all(one is None or (isinstance(one, int) and one >= 0) for one in listed):
        raise ValueError(f"{folder / 'generation_config.json'}: eos_token_id is {listed!r}, not token ids")
    special = {token_id for token_id, token in added.items() if token.special}
    explicit = str(config.get("tokenizer_class", "")).startswith(_CLASSES_ADDING_BOS) and "add_bos_token" in config
    return TokenizerSpec(
        name=str(folder),
        family=family,
        added_ids=frozenset(added),
        special_ids=frozenset({*special, *(one for one in (bos, eos) if one is not None)}),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=tuple(dict.fromkeys(one for one in [eos, *listed] if one is not None)),
        prefix_ids=(bos,) if explicit and config["add_bos_token"] and bos is not None else (),
        suffix_ids=(eos,) if explicit and config.get("add_eos_token") and eos is not None else (),
        backend_adds_special=not explicit,
        strip_leading_space=strip_leading_space,
        chat_templates=_chat_templates(config, folder),
        special_tokens=strings,
    )


def _token_string(value: Any) -> str | None:
    """A token from a config: a string, or the serialized form of an added token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The decoders of tokenizer.json, sequences flattened."""
    if not isinstance(decoder, Mapping):
        return
    yield decoder
    for step in decoder.get("decoders", []):
        yield from _steps(step)


def _decoding(description: Mapping[str, Any], file: Path) -> tuple[Family, bool]:
    """The vocabulary's family and whether decoding drops a leading space, from the decoder's description."""
    steps = {step.get("type"): step for step in _steps(description.get("decoder"))}
    if "ByteLevel" in steps:
        return Family.BYTE_LEVEL, False
    if "Metaspace" in steps:
        metaspace = steps["Metaspace"]
        scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
        return Family.SENTENCEPIECE, scheme != "never"
    if "ByteFallback" in steps:
        return Family.SENTENCEPIECE, steps.get("Strip", {}).get("start", 0) > 0
    raise ValueError(
        f"{file}: its decoder is {sorted(map(str, steps)) or None}; only byte-level (ByteLevel) and SentencePiece "
        "(Metaspace or ByteFallback) vocabularies are supported"
    )


def _chat_templates(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Templates by name; a file of its own goes before the config's entry."""
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    for named in entry if isinstance(entry, list) else []:
        if not isinstance(named, Mapping) or not all(isinstance(named.get(key), str) for key in ("name", "template")):
            raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template entries need a name and a template")
        templates[named["name"]] = named["template"]
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates
