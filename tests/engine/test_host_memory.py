"""Free host memory, read from made-up /proc and /sys trees: every layout of control groups, limits at any height."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxinfer.engine.host_memory import available_host_bytes, cgroup_free_bytes

MB = 10**6
NO_LIMIT_V1 = 9223372036854771712


def make_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def group_v2(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    path = f"sys/fs/cgroup/{folder}"
    stat = f"anon 1\nfile {cache}\ninactive_file {cache}\nactive_file 0\n"
    return {f"{path}/memory.max": f"{limit}\n", f"{path}/memory.current": f"{used}\n", f"{path}/memory.stat": stat}


def group_v1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    path = f"sys/fs/cgroup/memory/{folder}"
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {cache}\n"
    return {
        f"{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{path}/memory.usage_in_bytes": f"{used}\n",
        f"{path}/memory.stat": stat,
    }


V2 = {"proc/self/cgroup": "0::/user/job\n"}
V1 = {"proc/self/cgroup": "3:cpu,cpuacct:/other\n4:memory:/user/job\n0::/unrelated\n"}
CASES = {
    "v2": (V2 | group_v2("user/job", str(500 * MB), 200 * MB), 300 * MB),
    "v2, unlimited": (V2 | group_v2("user/job", "max", 200 * MB), None),
    "v2, a limit above": (
        V2 | group_v2("user", str(400 * MB), 300 * MB) | group_v2("user/job", str(900 * MB), MB),
        100 * MB,
    ),
    "v2, cached files can go": (V2 | group_v2("user/job", str(500 * MB), 450 * MB, 200 * MB), 250 * MB),
    "v2, over its limit": (V2 | group_v2("user/job", str(100 * MB), 150 * MB), 0),
    "v2, a namespace's root": ({"proc/self/cgroup": "0::/\n"} | group_v2("", str(70 * MB), 20 * MB), 50 * MB),
    "v2, above the mounted root": (
        {"proc/self/cgroup": "0::/../../x\n"} | group_v2("", str(70 * MB), 20 * MB),
        50 * MB,
    ),
    "v1": (V1 | group_v1("user/job", 500 * MB, 200 * MB, 50 * MB), 350 * MB),
    "v1, the host's path": (V1 | group_v1("", 300 * MB, 200 * MB), 100 * MB),
    "v1, a limit above": (V1 | group_v1("user", 80 * MB, 0) | group_v1("user/job", NO_LIMIT_V1, 0), 80 * MB),
    "both": (
        {"proc/self/cgroup": "4:memory:/a\n0::/a\n"}
        | group_v1("a", 500 * MB, 100 * MB)
        | group_v2("a", str(300 * MB), 0),
        300 * MB,
    ),
    "none": ({}, None),
    "not numbers": (V2 | group_v2("user/job", "many", 1), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_control_groups_leave(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    assert cgroup_free_bytes(make_root(tmp_path, files)) == expected


@pytest.mark.parametrize(("limit", "expected"), [("max", 700 * 1024), (str(600 * 1024), 600 * 1024 - 100)])
def test_the_tighter_of_system_and_control_group(tmp_path: Path, limit: str, expected: int) -> None:
    meminfo = "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:     700 kB\nHugePages_Total:  0\n"
    root = make_root(tmp_path, V2 | {"proc/meminfo": meminfo} | group_v2("user/job", limit, 100))
    assert available_host_bytes(root) == expected


def test_without_proc_it_is_physical_memory_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_host_bytes(tmp_path) == 40960
    monkeypatch.delattr(os, "sysconf")
    assert available_host_bytes(tmp_path) is None


def test_of_this_machine() -> None:
    found = available_host_bytes()
    assert found is None or 10 * MB < found < 10**15
