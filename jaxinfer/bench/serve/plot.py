"""A picture of a run: how latencies are distributed, and what was served when."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.serve.records import Record

_NUM_BINS = 60
_ENDINGS = (".svg", ".png", ".pdf")
_COLORS = {"ttft": "#2a6f97", "tpot": "#c8553d", "e2e": "#588157"}
_TITLES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "whole request"}


def import_figure() -> Any:
    """Matplotlib's Figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'jaxinfer[bench]'") from error
    return Figure


def check_picture(path: str) -> None:
    """See before a long run whether its picture can be drawn.

    Raises:
        ValueError: matplotlib is not installed, the name has no known ending, or its folder does not exist.
    """
    import_figure()
    if not path.endswith(_ENDINGS):
        raise ValueError(f"--plot {path}: the name must end with {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no such folder")


def draw(path: str, records: Sequence[Record], duration_s: float, slo: Mapping[str, float], title: str) -> None:
    """Write the picture to `path`, as SVG, PNG or PDF by its name.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    figure = import_figure()(figsize=(11, 6), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    top, bottom = figure.subfigures(2, 1)
    good = [record for record in records if record.ok]
    for axes, name in zip(top.subplots(1, 3), _COLORS, strict=True):
        values = sorted(v for r in good if (v := getattr(r, f"{name}_s")) is not None)
        _draw_distribution(axes, name, values, slo.get(name))
    _draw_timeline(bottom.subplots(1, 1), good, duration_s)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _draw_distribution(axes: Any, name: str, values: list[float], limit_s: float | None) -> None:
    axes.set_title(_TITLES[name], fontsize=10)
    unit, scale = ("s", 1) if values and values[-1] > 10 else ("ms", 1e3)
    axes.set(xlabel=unit, ylim=(0, 1.02), yticks=(0, 0.25, 0.5, 0.75, 0.9, 1))
    axes.set_yticklabels(("0", "25%", "50%", "75%", "90%", "100%"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if values:
        shares = [(index + 1) / len(values) for index in range(len(values))]
        scaled = [value * scale for value in values]
        axes.step([scaled[0], *scaled], [0, *shares], where="post", color=_COLORS[name], linewidth=1.8)
        axes.fill_between([scaled[0], *scaled], [0, *shares], step="post", color=_COLORS[name], alpha=0.12)
    if limit_s is not None:
        axes.axvline(limit_s * scale, color="black", linestyle="--", linewidth=1)
        axes.text(limit_s * scale, 0.04, " SLO", fontsize=8)


def _draw_timeline(axes: Any, good: Sequence[Record], duration_s: float) -> None:
    width_s = duration_s / _NUM_BINS
    edges = [index * width_s for index in range(_NUM_BINS + 1)]
    tokens = tokens_over_time(good, duration_s, _NUM_BINS)
    axes.stairs([count / width_s for count in tokens], edges, fill=True, color=_COLORS["ttft"], alpha=0.45)
    axes.set(xlabel="seconds", ylabel="output tokens/s", xlim=(0, duration_s))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    running = axes.twinx()
    running.step(edges, running_at(good, edges), where="post", color=_COLORS["tpot"], linewidth=1.4)
    running.set_ylabel("requests under way", color=_COLORS["tpot"])
    running.set_ylim(bottom=0)
    for each in (axes, running):
        each.spines["top"].set_visible(False)


def tokens_over_time(records: Sequence[Record], duration_s: float, num_bins: int) -> list[float]:
    """Output tokens in each of `num_bins` equal parts of the run; a request's tokens are spread over its chunks."""
    counts = [0.0] * num_bins
    for record in records:
        for moment_s in record.text_s:
            index = min(num_bins - 1, int(moment_s / duration_s * num_bins))
            counts[index] += record.num_tokens / len(record.text_s)
    return counts


def running_at(records: Sequence[Record], moments_s: Sequence[float]) -> list[int]:
    """How many requests were scheduled and not yet answered, at each moment."""
    begun = sorted(record.due_s for record in records)
    ended = sorted(record.last_s for record in records if record.last_s is not None)
    return [bisect.bisect_right(begun, moment) - bisect.bisect_right(ended, moment) for moment in moments_s]
