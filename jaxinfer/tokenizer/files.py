"""What a tokenizer is rebuilt from, gathered so that a converted checkpoint can carry it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GGUF_METADATA_NAME = "tokenizer_gguf.json"
"""The tokenizer's part of a GGUF file's metadata, in a converted checkpoint's folder."""

_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def gguf_metadata(path: Path) -> Mapping[str, Any]:
    """A GGUF file's key-value pairs.

    Raises:
        CheckpointError: (a ValueError) the file is damaged.
    """
    from jaxinfer.checkpoint.gguf import GGUFCheckpoint

    with GGUFCheckpoint(path) as checkpoint:
        return checkpoint.config


def tokenizer_files(source: Path) -> dict[str, Path | bytes]:
    """The files, or their bytes, of a folder from which `load_tokenizer` makes the tokenizer that it makes of `source`.

    Args:
        source: a path that `load_tokenizer` takes.
    """
    if is_gguf(source):
        metadata = {key: value for key, value in gguf_metadata(source).items() if key.startswith("tokenizer.")}
        return {GGUF_METADATA_NAME: json.dumps(metadata, ensure_ascii=False).encode()}
    if (source / GGUF_METADATA_NAME).is_file():
        return {GGUF_METADATA_NAME: source / GGUF_METADATA_NAME}
    folder, main = (source, source / "tokenizer.json") if source.is_dir() else (source.parent, source)
    found = [folder / name for name in _COMPANIONS if (folder / name).is_file()]
    found += sorted(folder.glob("additional_chat_templates/*.jinja"))
    return {"tokenizer.json": main, **{path.relative_to(folder).as_posix(): path for path in found}}
