"""The environment names all that programs follow from, and shows a change of each."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxinfer.engine import environment as module
from jaxinfer.engine.environment import environment, version_of


@pytest.fixture
def fresh():
    """What has been found out is forgotten, before and after."""
    module._parts.cache_clear()
    yield
    module._parts.cache_clear()


def test_it_is_of_this_process():
    found = environment()
    assert found["jax"] == jax.__version__ and found["platform"].startswith(jax.default_backend())
    assert all(isinstance(value, str) for value in found.values())
    assert found["processor"] and len(found["sources of jaxinfer"]) == 64
    found.clear()  # a copy
    assert environment()["jax"] == jax.__version__
    assert version_of("jax") == jax.__version__ and version_of("no-such-package-is-installed") == ""


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_are_part_of_it(name, fresh, monkeypatch):
    before = environment()
    module._parts.cache_clear()
    monkeypatch.setenv(name, "--xla_some_flag=true")
    assert environment() == {**before, name: "--xla_some_flag=true"}


@pytest.mark.parametrize("name", ["_sources_digest", "_processor", "version_of"])
def test_versions_sources_and_processor_are_part_of_it(name, fresh, monkeypatch):
    before = environment()
    module._parts.cache_clear()
    other = [("processor", "another")] if name == "_processor" else "another"
    monkeypatch.setattr(module, name, lambda *_: other)
    changed = {part for part, value in environment().items() if value != before[part]}
    expected = {
        "_sources_digest": {"sources of jaxinfer"},
        "_processor": {"processor"},
        "version_of": {"jax", "jaxlib", "flax", "numpy"},
    }
    assert changed == expected[name]


def test_the_processor_is_told_by_name_and_features(monkeypatch):
    core = "processor\t: {}\nmodel name\t: Fast 9000\nflags\t\t: fpu avx2 avx512f\ncpu MHz\t\t: 2{}00.0\n\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: core.format(0, 1) + core.format(1, 2))
    assert dict(module._processor()) == {"processor": "Fast 9000", "processor features": "fpu avx2 avx512f"}

    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert dict(module._processor())["processor"]
