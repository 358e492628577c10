"""The picture of a run: reward, staleness split, pool and length ratio over the steps, as one PNG.

matplotlib is optional and loaded only where something is drawn. Nothing global is touched: no pyplot, no backend
choice, no style.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pace_agent.report.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GREY, INK = "#3b6fb6", "#e08e3c", "#3a9b6f", "#c8553d", "#b8bec8", "#2f3640"
FONT = 9.5
WINDOW = 10
"""Steps of the moving mean that is drawn over the reward."""


class Drawn(NamedTuple):
    """Where the picture is; None with the reason when there is none."""

    path: Path | None
    reason: str = ""


def draw_run(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> Drawn:
    """Draw the rows of `metrics.jsonl` into a PNG. A figure that a row does not have leaves a gap."""
    if not rows:
        return Drawn(None, "no step was made, so there is nothing to draw")
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return Drawn(None, "matplotlib is not installed; `pip install 'pace-agent[report]'` brings it")
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(11, 6.8), dpi=130, layout=spacing, facecolor="white")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    axes = figure.subplots(2, 2, sharex=True)
    steps = [float(row["step"]) for row in rows]
    for axis, panel in zip(axes.flat, (_reward, _staleness, _pool, _lengths), strict=True):
        _plain(axis, steps)
        panel(axis, steps, rows)
    for axis in axes[1]:
        axis.set_xlabel("step", fontsize=FONT, color=INK)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())
    return Drawn(path)


def _reward(axis: "Axes", steps: list[float], rows: Sequence[Mapping[str, Any]]) -> None:
    _head(axis, "Reward", "mean of what a step completed")
    reward = _column(rows, "reward/mean")
    axis.plot(steps, reward, color=BLUE, alpha=0.35, linewidth=1.1, marker="." if len(steps) < 3 else "", label="step")
    if len(steps) >= WINDOW:
        axis.plot(steps, _moving_mean(reward), color=BLUE, linewidth=2.2, label=f"mean of {WINDOW} steps")
    held_out = _column(rows, "eval/reward_mean")
    if any(math.isfinite(value) for value in held_out):
        axis.plot(
            steps,
            held_out,
            color=RED,
            linestyle="none",
            marker="D",
            markersize=5,
            clip_on=False,
            zorder=5,
            label="held-out",
        )
    _legend(axis)


def _staleness(axis: "Axes", steps: list[float], rows: Sequence[Mapping[str, Any]]) -> None:
    _head(axis, "Staleness", "mean at the draw, in versions")
    generation, waiting, effective = (
        _column(rows, f"staleness/{part}_mean") for part in ("generation", "waiting", "effective")
    )
    axis.stackplot(
        steps,
        [_filled(generation), _filled(waiting)],
        labels=["generation", "waiting"],
        colors=[BLUE, ORANGE],
        alpha=0.55,
        linewidth=0,
    )
    axis.plot(steps, effective, color=INK, linewidth=1.5, label="effective")
    axis.set_ylim(bottom=0)
    _legend(axis)


def _pool(axis: "Axes", steps: list[float], rows: Sequence[Mapping[str, Any]]) -> None:
    _head(axis, "Pool", "entries at the draw")
    axis.plot(steps, _column(rows, "pool/occupancy"), color=GREEN, linewidth=1.7, label="occupancy")
    axis.plot(steps, _column(rows, "pool/target"), color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label="target")
    axis.bar(steps, _filled(_column(rows, "pool/budget")), width=0.9, color=RED, alpha=0.7, label="rejected (budget)")
    axis.set_ylim(bottom=0)
    _legend(axis)


def _lengths(axis: "Axes", steps: list[float], rows: Sequence[Mapping[str, Any]]) -> None:
    _head(axis, "Length", "trained over generated; 1 is no bias")
    axis.axhline(1.0, color=GREY, linewidth=1.1)
    tail = _column(rows, "pool/tail_share")
    if any(math.isfinite(value) for value in tail):
        axis.plot(steps, tail, color=ORANGE, linewidth=1.2, alpha=0.9, label="share of long ones")
    axis.plot(steps, _column(rows, "pool/length_ratio"), color=BLUE, linewidth=1.9, label="mean length")
    low, high = axis.get_ylim()
    reach = max(0.1, 1.05 * max(1 - low, high - 1))
    axis.set_ylim(1 - reach, 1 + reach)
    _legend(axis)


def _plain(axis: "Axes", steps: list[float]) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(GREY)
    axis.grid(axis="y", color="#eceff3", linewidth=0.9)
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK, labelsize=FONT - 1, length=0)
    if len(steps) > 1:
        axis.set_xlim(steps[0], steps[-1])


def _head(axis: "Axes", name: str, says: str) -> None:
    axis.set_title(name, loc="left", fontsize=FONT + 1.5, fontweight="bold", color=INK, pad=18)
    axis.annotate(
        says, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=FONT - 1, color="#7a828e"
    )


def _legend(axis: "Axes") -> None:
    """In the head, on the right, where no curve runs."""
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 1.0),
        ncols=3,
        frameon=False,
        fontsize=FONT - 1,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The figure in every row; not-a-number where a row has none, which is drawn as a gap."""
    return [math.nan if (value := row.get(name)) is None else float(value) for row in rows]


def _filled(values: list[float]) -> list[float]:
    return [value if math.isfinite(value) else 0.0 for value in values]


def _moving_mean(values: list[float]) -> list[float]:
    """Mean of the last WINDOW values, over those that there are."""
    out = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - WINDOW) : end] if math.isfinite(value)]
        out.append(sum(known) / len(known) if known else math.nan)
    return out
