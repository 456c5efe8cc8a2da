"""Progress bars: a notebook's shows late, is updated in place and leaves an empty output; a terminal's is tqdm's."""

from __future__ import annotations

import types

import IPython
import IPython.display
import pytest

from jaxinfer import progress


@pytest.fixture
def shown(monkeypatch):
    """The data that each display and each update of it would show, in a pretended kernel."""
    published = []

    def display(data, *, raw, display_id):
        published.append(data)
        return types.SimpleNamespace(update=lambda data, raw: published.append(data))

    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=None))
    monkeypatch.setattr(IPython.display, "display", display)
    return published


def test_a_long_task_shows_in_a_notebook_and_is_gone_at_its_end(shown, monkeypatch, capsys):
    monkeypatch.setattr(progress, "NOTEBOOK_DELAY_S", 0)
    with progress.progress_bar(shown=True, desc="compiling", mininterval=0) as bar:
        bar.total = 4
        bar.update(2)
    assert [list(data) for data in shown[:-1]] == [["text/plain"]] * (len(shown) - 1)
    assert shown[-2]["text/plain"].startswith("compiling:  50%|") and "2/4" in shown[-2]["text/plain"]
    assert shown[-1] == {}
    assert capsys.readouterr() == ("", "")


def test_a_short_task_shows_nothing_in_a_notebook(shown):
    with progress.progress_bar(shown=True, total=2, mininterval=0) as bar:
        bar.update(2)
        bar.set_postfix_str("fast")
    assert shown == []


def test_a_bar_that_is_not_shown_is_silent(shown, monkeypatch, capsys):
    monkeypatch.setattr(progress, "NOTEBOOK_DELAY_S", 0)
    with progress.progress_bar(shown=False, total=2) as bar:
        bar.update(2)
    assert shown == [] and capsys.readouterr() == ("", "")


def test_outside_a_kernel_the_bar_goes_to_stderr(capsys):
    assert not progress.in_notebook() and not progress.can_show()
    with progress.progress_bar(shown=True, total=2) as bar:
        bar.update(2)
    out, err = capsys.readouterr()
    assert out == "" and "0/2" in err
