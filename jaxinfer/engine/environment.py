"""What the programs of this process follow from besides their description: versions, sources, flags and the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def environment() -> dict[str, str]:
    """By name, what every program of this process follows from and does not change in it.

    Where two are equal, one description gives one program, and on a CPU the same bits: whatever the number of threads,
    which is no part of it.
    """
    return dict(_parts())


@cache
def _parts() -> tuple[tuple[str, str], ...]:
    client = jax.devices()[0].client
    return (
        *((package, version_of(package)) for package in ("jax", "jaxlib", "flax", "numpy")),
        ("python", " ".join(sys.version.split())),
        ("sources of jaxinfer", _sources_digest()),
        ("platform", f"{client.platform} {client.platform_version}"),
        ("process", str(client.process_index())),
        ("devices", ", ".join(f"{device.id} {device.device_kind}" for device in jax.devices())),
        *((name, os.environ.get(name, "")) for name in _FLAGS),
        *_processor(),
    )


def version_of(package: str) -> str:
    """Of an installed package; "" for one that is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _sources_digest() -> str:
    """Of the sources of this package and its kernels."""
    import pallas_kernels

    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], Path(pallas_kernels.__file__ or "").parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root.parent)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor() -> Iterator[tuple[str, str]]:
    """The processor's name and features, which code for CPUs is compiled for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [f"model name: {platform.machine()} {platform.processor()}"]
    wanted = {
        "processor": ("model name", "CPU implementer", "CPU part"),
        "processor features": ("flags", "Features", "isa"),
    }
    for name, keys in wanted.items():
        found = {line.partition(":")[2].strip() for line in lines if line.startswith(keys)}
        yield name, ", ".join(sorted(found))
