"""`pace-agent simulate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pace_agent.errors import UserError
from pace_agent.report.policies import draw_policies
from pace_agent.simulate import Figures, Simulator, Workload
from pace_agent.simulate.rules import RULES, rule_options

COLUMNS = (
    ("policy", None, ""),
    ("trainer\nbusy", "busy", ".0%"),
    ("trained\nper s", "trained_per_second", ".3g"),
    ("token\nstaleness", "token_staleness", ".2f"),
    ("gener-\nation", "token_generation", ".2f"),
    ("wait-\ning", "token_waiting", ".2f"),
    ("p95", "p95", ".1f"),
    ("rejected", "rejected_share", ".0%"),
    ("length\nratio", "length_ratio", ".2f"),
    ("tail\nshare", "tail_share", ".2f"),
    ("slots\nbusy", "slots_busy", ".0%"),
)
WIDTH = 96
"""Of the table. On a narrower screen its lines wrap, but no number is cut off."""


def given_workload(ratio: float | None, step_seconds: float | None, **settings: Any) -> Workload:
    """The workload by its ratio, or with the trainer's step in seconds instead."""
    if ratio is not None and step_seconds is not None:
        raise UserError("--ratio and --step-seconds both say how fast the trainer is; give one of them")
    return Workload(**settings) if ratio is None else Workload(ratio=ratio, **settings)


def run(
    workload: Workload,
    *,
    policies: str | None,
    pool: dict[str, Any],
    steps: int,
    seed: int,
    step_seconds: float | None,
    as_json: bool,
    figure: Path | None,
) -> None:
    """Simulate every policy on the same rollouts, and print what came out. `pool`: options that all policies share."""
    if figure is not None and (figure.suffix != ".png" or not figure.parent.is_dir()):
        raise UserError(f"--figure names a .png file in a folder that exists, got {figure}")
    names = list(RULES) if policies is None else [name.strip() for name in policies.split(",")]
    runs = {name: _simulator(name, workload, pool, steps, seed, step_seconds) for name in names}
    results: dict[str, Figures] = {}
    with Console(stderr=True).status("simulating") as status:
        for name, each in runs.items():
            status.update(f"simulating {name}")
            results[name] = each.run()
    rows = {name: result.to_dict() for name, result in results.items()}
    settings = asdict(workload) | pool | {"steps": steps, "seed": seed, "step_seconds": runs[names[0]].step_seconds}
    if as_json:
        print(json.dumps({"settings": settings, "policies": rows}))
    else:
        _print_table(results)
    if figure is not None:
        drawn = draw_policies(rows, figure, title=_title(workload, step_seconds))
        if drawn.path is None:
            raise UserError(f"--figure: {drawn.reason}")


def _simulator(
    name: str, workload: Workload, pool: dict[str, Any], steps: int, seed: int, step_seconds: float | None
) -> Simulator:
    options = rule_options(name, **pool)
    return Simulator(workload, options, steps=steps, warmup=steps // 4, seed=seed, step_seconds=step_seconds)


def _title(workload: Workload, step_seconds: float | None) -> str:
    pace = f"{workload.ratio:g} times what is consumed" if step_seconds is None else f"steps of {step_seconds:g} s"
    return f"{workload.slots} slots, {pace}"


def _print_table(results: dict[str, Figures]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, _, _ in COLUMNS:
        table.add_column(title, justify="left" if title == "policy" else "right", vertical="bottom")
    for name, result in results.items():
        table.add_row(name, *_cells(result))
    console.print(table)
    first = next(iter(results.values()))
    console.print(
        f"\nSteps {first.steps} after warm-up, {first.step_seconds:.3g} s each without waiting. Staleness in versions, "
        "weighed by tokens;\np95, length ratio and tail share by rollouts, trained over completed.",
        style="dim",
    )


def _cells(result: Figures) -> Sequence[str]:
    values = ((getattr(result, key), form) for _, key, form in COLUMNS if key is not None)
    return ["-" if value is None else format(value, form) for value, form in values]
