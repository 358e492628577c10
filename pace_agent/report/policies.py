"""The picture of a comparison: throughput, staleness, waste and length bias of several policies, as one PNG."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace_agent.report.files import write_atomic
from pace_agent.report.plots import BLUE, FONT, GREEN, GREY, INK, ORANGE, RED, Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Mapping[str, Mapping[str, Any]]
"""By policy, what `pace_agent.simulate.Figures.to_dict` returns."""

OUT_OF_SCALE = 4
"""A bar more than this many times the median is cut at the edge; its number still stands beside it."""


def draw_policies(rows: Rows, path: Path, *, title: str = "") -> Drawn:
    """Draw one row of bars for each policy in each of four panels."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return Drawn(None, "matplotlib is not installed; `pip install 'pace-agent[report]'` brings it")
    figure = Figure(
        figsize=(11, 1.6 + 0.62 * len(rows)), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    axes = figure.subplots(2, 2, sharey=True)
    for axis, panel in zip(axes.flat, (_throughput, _staleness, _waste, _lengths), strict=True):
        _plain(axis, list(rows))
        panel(axis, rows)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())
    return Drawn(path)


def _throughput(axis: "Axes", rows: Rows) -> None:
    _head(axis, "Trainer", "share of the time in which it works")
    _bars(axis, _column(rows, "busy"), BLUE, "{:.0%}".format)


def _staleness(axis: "Axes", rows: Rows) -> None:
    _head(axis, "Staleness", "mean over trained tokens, in versions")
    generation, waiting = _column(rows, "token_generation"), _column(rows, "token_waiting")
    places = range(len(rows))
    axis.barh(places, generation, height=0.62, color=ORANGE, label="generation")
    axis.barh(places, waiting, left=generation, height=0.62, color=BLUE, label="waiting")
    _numbers(axis, _column(rows, "token_staleness"), "{:.2f}".format)
    axis.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=2, frameon=False, fontsize=FONT - 1)


def _waste(axis: "Axes", rows: Rows) -> None:
    _head(axis, "Waste", "rejected rollouts, over rejected and trained")
    _bars(axis, _column(rows, "rejected_share"), RED, "{:.0%}".format)


def _lengths(axis: "Axes", rows: Rows) -> None:
    _head(axis, "Long rollouts", "their share, trained over completed; 1 is no bias")
    axis.axvline(1.0, color=GREY, linewidth=1.1)
    _bars(axis, _column(rows, "tail_share"), GREEN, "{:.2f}".format)


def _column(rows: Rows, name: str) -> list[float]:
    return [math.nan if row[name] is None else float(row[name]) for row in rows.values()]


def _bars(axis: "Axes", values: Sequence[float], color: str, form: Callable[[float], str]) -> None:
    axis.barh(range(len(values)), values, height=0.62, color=color)
    _numbers(axis, values, form)


def _numbers(axis: "Axes", values: Sequence[float], form: Callable[[float], str]) -> None:
    """Every value at the end of its bar, and room for it."""
    known = sorted(value for value in values if math.isfinite(value) and value > 0)
    median = known[len(known) // 2] if known else 1.0
    edge = max((value for value in known if value <= OUT_OF_SCALE * median), default=1.0)
    axis.set_xlim(0, 1.22 * edge)
    for place, value in enumerate(values):
        at = min(value, 1.06 * edge) if math.isfinite(value) else 0.0
        text = form(value) if math.isfinite(value) else "undefined"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if value > at else None
        axis.text(at + 0.015 * edge, place, text, va="center", fontsize=FONT - 1, color=INK, bbox=box)


def _plain(axis: "Axes", names: Sequence[str]) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GREY)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(colors=INK, labelsize=FONT - 1, length=0)


def _head(axis: "Axes", name: str, says: str) -> None:
    axis.set_title(name, loc="left", fontsize=FONT + 1.5, fontweight="bold", color=INK, pad=18)
    axis.annotate(
        says, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=FONT - 1, color="#7a828e"
    )
