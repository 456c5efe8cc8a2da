"""How much of the host's memory this process may still take: what the system has free, within its control groups.

Linux: /proc/meminfo and the cgroup file systems, of version 1, 2 or both, where they are usually mounted. Elsewhere the
size of physical memory through `os.sysconf`, since free memory has no portable door; None where that is missing too, as
on Windows. Sources: proc_meminfo(5), cgroups(7), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_SLASH = Path("/")


def available_host_bytes(root: Path = _SLASH) -> int | None:
    """Bytes that this process may take before the system or a control group runs out; None where nothing tells.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    found = [each for each in (_system_bytes(root), cgroup_free_bytes(root)) if each is not None]
    return min(found) if found else None


def _system_bytes(root: Path) -> int | None:
    """MemAvailable: free memory, and the caches that the kernel would give up for it."""
    fields = _fields(root / "proc" / "meminfo")
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024  # the file says kB and means KiB
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def cgroup_free_bytes(root: Path = _SLASH) -> int | None:
    """What the limits of this process's control groups leave, the tightest of them; None where there is no limit.

    A group's limit holds for the groups below it together, so every group on the way up counts. Pages of files that
    the kernel would drop (`inactive_file`) are charged to a group and count as free.
    """
    found = []
    for folder in _cgroup_folders(root):
        for limit_name, usage_name, cache_name in _FILES:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                cache = _fields(folder / "memory.stat").get(cache_name, 0)
                found.append(max(0, limit - max(0, usage - cache)))
    return min(found) if found else None


_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1; no limit is about 2^63
)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The memory controller's folder of this process's group, and those above it.

    /proc/self/cgroup has lines `id:controllers:path`, with no controllers in version 2. In a container the path may
    be that of the host, which is not mounted there, or lead above the mounted root by "..": the root then stands for
    the group.
    """
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        mount = root / "sys" / "fs" / "cgroup"
        if "memory" in controllers.split(","):
            mount = mount / "memory"
        elif number != "0" or controllers:
            continue
        parts = PurePosixPath(name).parts[1:]
        if ".." in parts:
            parts = ()
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The whole number that a file holds; None where it is missing or says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines `name number …` by name."""
    parts = [line.split() for line in _lines(path)]
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isascii() and part[1].isdigit()}
