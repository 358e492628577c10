"""What a run shows while it goes on: a live panel on a terminal, one plain line a step elsewhere.

Figures are read from a step's metrics by their names; one that a step does not have keeps its last value.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows the steps of a run on `stream` (standard error by default). Use it as a context manager.

    `done` steps were made before this process, in a run that was resumed; the time left counts only the new ones.
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, title: str = "", done: int = 0) -> None:
        self.total_steps = total_steps
        self.title = title
        self.step = done
        self._first = done
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None
        self._values: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=48)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self.render(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show a step. `metrics["step"]` is the number of steps made; without it this is one more."""
        self.step = int(metrics.get("step", self.step + 1))
        self._values.update(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if self._live is not None:
            self._live.update(self.render())
        else:
            self._console.print(self.line(), soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """A line of text that stays, above the panel."""
        self._console.print(text, soft_wrap=True, markup=False)

    def seconds_left(self) -> float | None:
        """At the mean pace of this process's steps; None before the first one."""
        made = self.step - self._first
        if made <= 0:
            return None
        return (time.monotonic() - self._started) / made * max(0, self.total_steps - self.step)

    def line(self) -> str:
        """The last step as one plain line."""
        parts = [
            f"step {self.step}/{self.total_steps}",
            f"reward {self._number('reward/mean', '.3f')}",
            f"version {self._number('trainer/policy_version', '.0f')}",
            f"pool {self._number('pool/occupancy', '.0f')}/{self._number('pool/target', '.0f')}",
            f"staleness {self._staleness()}",
            f"interrupted {self._number('rollout/interrupted_total', '.0f')}",
            f"{self._number('rollout/tokens_per_second', ',.0f')} tok/s",
            f"left {_clock(self.seconds_left())}",
        ]
        return "  ".join(parts)

    def render(self) -> RenderableType:
        """The panel."""
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(
            ProgressBar(total=max(1, self.total_steps), completed=self.step),
            Text(f"{self.step}/{self.total_steps}  {_clock(self.seconds_left())} left", style="bold"),
        )
        body = Table.grid(padding=(0, 3))
        for _ in range(4):
            body.add_column(no_wrap=True)
        cells = [
            ("reward", self._number("reward/mean", ".3f")),
            ("policy version", self._number("trainer/policy_version", ".0f")),
            ("pool", f"{self._number('pool/occupancy', '.0f')} of {self._number('pool/target', '.0f')}"),
            ("rejected", self._number("pool/rejected_total", ".0f")),
            ("staleness", self._staleness()),
            ("interrupted", self._number("rollout/interrupted_total", ".0f")),
            ("tokens/s", self._number("rollout/tokens_per_second", ",.0f")),
            ("in flight", self._number("rollout/running", ".0f")),
        ]
        for left, right in zip(cells[::2], cells[1::2], strict=True):
            body.add_row(Text(left[0], style="dim"), left[1], Text(right[0], style="dim"), right[1])
        parts: list[RenderableType] = [head, body]
        if len(self._rewards) > 1:
            parts.append(Text.assemble(("reward ", "dim"), (sparkline(list(self._rewards)), "green")))
        return Panel(Group(*parts), title=self.title or None, title_align="left", border_style="dim", padding=(0, 1))

    def _number(self, name: str, form: str) -> str:
        value = self._values.get(name)
        return "-" if value is None else format(value, form)

    def _staleness(self) -> str:
        """generation + waiting = effective, in versions."""
        parts = [self._number(f"staleness/{name}_mean", ".2f") for name in ("generation", "waiting", "effective")]
        return f"{parts[0]}+{parts[1]}={parts[2]}" if set(parts) != {"-"} else "-"


def sparkline(values: list[float]) -> str:
    """One character per value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
