"""The notebooks in examples/: each runs twice over in one kernel of its own, and its committed outputs are those.

`python tests/examples/test_notebooks.py` makes the committed outputs anew.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

# What a pass over the cells leaves behind, as the last line of the output.
PROBE = """
import json, jax, psutil
arrays = [each for each in jax.live_arrays() if each.nbytes > 1_000_000]
print(json.dumps({"num_large_arrays": len(arrays), "rss_bytes": psutil.Process().memory_info().rss}))
del arrays
"""


def execute(cells: list[Any], metadata: Any) -> Any:
    """A notebook of these cells with the outputs of a fresh kernel. Raises `CellExecutionError`."""
    # Each cell has an id of its own, also where the same cells come twice.
    own = [nbformat.from_dict({**copy.deepcopy(cell), "id": f"cell-{index}"}) for index, cell in enumerate(cells)]
    notebook = nbformat.v4.new_notebook(cells=own, metadata=copy.deepcopy(metadata))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=120,
            record_timing=False,
            coalesce_streams=True,
            # Socket files rather than open ports.
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
            resources={"metadata": {"path": str(ROOT / "examples")}},
        ).execute(env={**os.environ, "PYTHONPATH": path})
    return notebook


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(cells: list[Any]) -> list[Any]:
    return [cell for cell in cells if cell.cell_type == "code"]


def text_of(cell: Any, stream: str = "stdout") -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == stream)


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def runs(request):
    """The committed notebook, both passes over its code cells, and what each pass left in memory."""
    committed = read(request.param)
    probe = nbformat.v4.new_code_cell(PROBE)
    once = [*code_cells(committed.cells), probe]
    cells = execute([*once, *once], committed.metadata).cells
    passes = [cells[: len(once)], cells[len(once) :]]
    memory = [json.loads(text_of(each.pop())) for each in passes]
    return committed, passes, memory


@pytest.mark.slow
def test_outputs_are_the_committed_ones(runs):
    committed, passes, _ = runs
    expected = code_cells(committed.cells)
    assert any("deterministic" in cell.metadata.get("tags", []) for cell in expected)
    for cells in passes:
        for cell, before in zip(cells, expected, strict=True):
            if "deterministic" in before.metadata.get("tags", []):
                assert text_of(cell) == text_of(before)


@pytest.mark.slow
def test_nothing_but_results_is_shown(runs):
    """No warnings, no dead widgets, and every progress bar is gone."""
    committed, passes, _ = runs
    for cells in (code_cells(committed.cells), *passes):
        for cell in cells:
            lines = text_of(cell, "stderr").splitlines()
            assert all(line.startswith("jaxinfer: ") for line in lines), lines
            shown = [output.data for output in cell.outputs if "data" in output]
            assert all(set(data) <= {"text/plain", "image/png"} for data in shown)
            assert not any("%|" in data.get("text/plain", "") for data in shown)


@pytest.mark.slow
def test_a_second_pass_takes_no_more_memory(runs):
    """Parameters take 0.5 GB: a first model that stayed would show."""
    _, _, (first, second) = runs
    assert (first["num_large_arrays"], second["num_large_arrays"]) == (0, 0)
    assert second["rss_bytes"] < first["rss_bytes"] + 250e6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_file_is_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert path.stat().st_size < 250_000
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/", path.read_text())
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    counts = [cell.execution_count for cell in code_cells(notebook.cells)]
    assert counts == list(range(1, len(counts) + 1))


def write_outputs() -> None:
    for path in NOTEBOOKS:
        notebook = read(path)
        for cell, made in zip(notebook.cells, execute(notebook.cells, notebook.metadata).cells, strict=True):
            if cell.cell_type == "code":
                cell.execution_count = made.execution_count
                # A progress bar that was shown and removed is an output without data.
                cell.outputs = [output for output in made.outputs if output.get("data", True)]
        nbformat.write(notebook, path)


if __name__ == "__main__":
    write_outputs()
