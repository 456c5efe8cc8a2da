"""The layering: who may import whom, what a bare import may load, and the repository's few mechanical rules."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels")
DOORS = ("serve", "batch", "bench", "chat", "convert", "generate")
DEVICE_CODE = (
    "jaxinfer.layers",
    "jaxinfer.models",
    "jaxinfer.sampling",
    "jaxinfer.cache.paged_kv",
    "jaxinfer.cache.untouched",
    "pallas_kernels",
)
HOST_CODE = (
    "jaxinfer.config",
    "jaxinfer.flags",
    "jaxinfer.request",
    "jaxinfer.metrics",
    "jaxinfer.scheduler",
    "jaxinfer.cache.page_allocator",
    "jaxinfer.cache.prefix_tree",
    "jaxinfer.jobs",
    "jaxinfer.structured",
    "jaxinfer.plan",
)
ENGINE_AND_ABOVE = (
    "jaxinfer.engine",
    "jaxinfer.llm",
    "jaxinfer.async_llm",
    "jaxinfer.quick",
    *(f"jaxinfer.{door}" for door in DOORS),
)

# (importers, what they may not import, why). Names cover their submodules.
FORBIDDEN: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (HOST_CODE, ("jax", "flax", "jaxinfer.models", "jaxinfer.layers"), "host code decides; it holds no arrays"),
    (HOST_CODE, ENGINE_AND_ABOVE, "only the engine loops; what it calls does not know it"),
    (DEVICE_CODE, ("jaxinfer.request", "jaxinfer.scheduler"), "device code sees arrays, not requests"),
    (DEVICE_CODE, ENGINE_AND_ABOVE, "layers ← models ← engine"),
    (("jaxinfer.layers",), ("jaxinfer.models",), "layers ← models"),
    (("jaxinfer.quantization",), ("jaxinfer.layers", "jaxinfer.models"), "quantization ← layers"),
    (("jaxinfer.checkpoint",), (*ENGINE_AND_ABOVE, "jaxinfer.scheduler"), "checkpoint ← engine"),
    (("jaxinfer.engine",), tuple(f"jaxinfer.{door}" for door in DOORS), "engine ← the doors"),
    *(
        ((f"jaxinfer.{door}",), tuple(f"jaxinfer.{other}" for other in DOORS if other != door), "doors stay apart")
        for door in DOORS
    ),
]
BASE_MODULES = ("jaxinfer.config", "jaxinfer.request", "jaxinfer.metrics", "jaxinfer.structured.params")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    return {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def import_nodes(node: ast.AST, top_level_only: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run: all, or only those that run when the module itself is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.orelse:
                yield from import_nodes(ast.Module([statement], []), top_level_only)
        else:
            yield from import_nodes(child, top_level_only)


def imports(module: str, source: str, is_package: bool, known: set[str], top_level_only: bool = False) -> set[str]:
    """Absolute names of the modules that `source` imports, as deep as they can be resolved."""
    found: set[str] = set()
    for node in import_nodes(ast.parse(source), top_level_only):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        submodules = {f"{base}.{alias.name}" for alias in node.names} & known
        found.update(submodules)
        if len(submodules) < len(node.names):
            found.add(base)
    return found


def graph(top_level_only: bool = False) -> dict[str, set[str]]:
    modules = sources()
    return {
        name: imports(name, path.read_text(), path.name == "__init__.py", set(modules), top_level_only)
        for name, path in modules.items()
    }


def violations(edges: dict[str, set[str]]) -> list[str]:
    found = []
    for importers, banned, why in FORBIDDEN:
        for module, targets in edges.items():
            if within(module, importers):
                found += [f"{module} imports {target}: {why}" for target in sorted(targets) if within(target, banned)]
    for module, targets in edges.items():
        if within(module, BASE_MODULES):
            bad = [t for t in targets if within(t, PACKAGES) and not within(t, BASE_MODULES)]
            found += [f"{module} imports {target}: everything stands on it" for target in sorted(bad)]
        if within(module, ("pallas_kernels",)):
            allowed = {"jax", "jaxtyping", "numpy", "pallas_kernels", "__future__"} | sys.stdlib_module_names
            bad = [t for t in targets if t.split(".")[0] not in allowed]
            found += [f"{module} imports {target}: kernels need only jax and numpy" for target in sorted(bad)]
    return found


def test_import_direction() -> None:
    assert violations(graph()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxinfer.scheduler.scheduler", "def f():\n    import jax.numpy as jnp"),
        ("jaxinfer.layers.linear", "from ..models import llama"),
        ("jaxinfer.layers.linear", "from jaxinfer.request import Request"),
        ("jaxinfer.config", "from jaxinfer import tokenizer"),
        ("jaxinfer.chat", "from jaxinfer.bench import timing"),
        ("jaxinfer.checkpoint.gguf", "from ..engine.engine import Engine"),
        ("pallas_kernels.paged_attention.api", "import flax"),
    ],
)
def test_import_direction_sees_a_violation(module: str, source: str) -> None:
    known = {"jaxinfer.tokenizer", "jaxinfer.models.llama", "jaxinfer.bench.timing"}
    assert violations({module: imports(module, source, False, known)})


def test_type_checking_imports_do_not_count() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\nelse:\n    import os\n"
    assert imports("jaxinfer.plan", source, False, set()) == {"typing", "os"}


def test_no_import_cycles() -> None:
    edges = graph(top_level_only=True)
    try:
        TopologicalSorter({name: targets & set(edges) for name, targets in edges.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import jaxinfer; print(*(set(sys.modules) - before))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jaxinfer" in loaded
    heavy = {"jax", "jaxlib", "flax", "numpy", "scipy", "orbax", "tensorstore", "tokenizers", "safetensors", "gguf"}
    heavy |= {
        "huggingface_hub",
        "jinja2",
        "requests",
        "tqdm",
        "llguidance",
        "jaxtyping",
        "ml_dtypes",
        "torch",
        "transformers",
    }
    assert loaded & heavy == set()


def tracked_files(*patterns: str) -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).exists()]


def test_files_stay_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked_files("*.py")}
    assert {name: length for name, length in lengths.items() if length >= 500} == {}


def test_scripts_are_executable() -> None:
    commands = [path for path in (*tracked_files("scripts/*"), *tracked_files(".ci/*")) if path.suffix == ""]
    assert {path.name for path in commands} >= {"test", "check", "serve", "run"}
    assert [path.name for path in commands if not os.access(path, os.X_OK)] == []
