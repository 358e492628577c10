"""Tables on the terminal."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def show(rows: Sequence[Row]) -> None:
    """A table with a column for each key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([written(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.rjust, line, widths)) for line in cells), flush=True)


def written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
