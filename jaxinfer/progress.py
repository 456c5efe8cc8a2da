"""Progress bars that leave nothing behind: tqdm's own in a terminal, a cell's output that is emptied in a notebook."""

from __future__ import annotations

import io
import sys
from typing import Any

from tqdm import tqdm

NOTEBOOK_DELAY_S = 0.5
"""A notebook's bar appears after this long, so that short calls make no output at all."""


def can_show() -> bool:
    """Whether somebody watches: a terminal on stderr, or a Jupyter kernel."""
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def progress_bar(*, shown: bool, **options: Any) -> tqdm:
    """A tqdm bar, removed when it is closed; `options` are tqdm's."""
    kind = _NotebookBar if shown and in_notebook() else tqdm
    return kind(disable=not shown, leave=False, **options)


class _NotebookBar(tqdm):
    """A line of text as a cell's output, updated in place.

    tqdm's own notebook bar is a widget: a saved notebook keeps its dead view and state, and it needs ipywidgets.
    """

    def __init__(self, **options: Any):
        self._handle: Any = None
        # tqdm also writes carriage returns to its file, which a notebook would keep.
        super().__init__(file=io.StringIO(), ascii=False, ncols=80, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show `msg`, the bar as it stands when None; an empty one clears the output. `pos` is for terminals."""
        from IPython.display import display

        text = str(self) if msg is None else msg
        data = {"text/plain": text} if text else {}
        if self._handle is not None:
            self._handle.update(data, raw=True)
        elif text and self.format_dict["elapsed"] >= NOTEBOOK_DELAY_S:
            self._handle = display(data, raw=True, display_id=True)
