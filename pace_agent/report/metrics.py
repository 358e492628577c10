"""`metrics.jsonl`: one row of figures per step.

What always holds:

* A row is whole once `write` has returned, and rows are in the order of their steps, each step once.
* A resumed run drops the rows after its checkpoint: the steps are done again.
* What is not finite is written as null, so that every line is valid JSON.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pace_agent.report.files import write_atomic

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows. `after` is the step of the checkpoint that the run goes on from; None for a new run."""

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        self.path = path
        if after is not None and path.exists():
            kept = [row for row in read_metrics(path) if row["step"] <= after]
            write_atomic(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; it is with the operating system when this returns."""
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a file. A last line that a crash cut off is left out; ValueError for a broken one before it."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
