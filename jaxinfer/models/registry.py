"""Which family a checkpoint belongs to. A model is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxinfer.models import llama

FAMILIES: tuple[ModuleType, ...] = (llama,)


def check_architecture(name: str) -> None:
    """Raise `ValueError` unless a family here has the architecture that a `ModelConfig` names."""
    known = sorted(
        {one for family in FAMILIES for one in (*family.HF_ARCHITECTURES.values(), *family.GGUF_ARCHITECTURES)}
    )
    if name not in known:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(known)}")


def family_of_hf(config: Mapping[str, Any]) -> ModuleType:
    """The module of the family that a `config.json` names.

    Raises:
        ValueError: no architecture, or one that no family here has.
    """
    names = config.get("architectures") or ["(none)"]
    for family in FAMILIES:
        if names[0] in family.HF_ARCHITECTURES:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.HF_ARCHITECTURES)
    raise ValueError(f"config.json: architecture {names[0]} is not supported; supported: {known}")


def family_of_gguf(metadata: Mapping[str, Any]) -> ModuleType:
    """The module of the family that a GGUF file's `general.architecture` names.

    Raises:
        ValueError: no architecture, or one that no family here has.
    """
    name = metadata.get("general.architecture", "(none)")
    for family in FAMILIES:
        if name in family.GGUF_ARCHITECTURES:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.GGUF_ARCHITECTURES)
    raise ValueError(f"general.architecture {name!r} is not supported; supported: {known}")
