"""What a run leaves when it ends: `summary.json`, `report.png`, and a last line."""

from pathlib import Path
from typing import Any

from pace_agent.cli.rollouts import RunEnd
from pace_agent.report.metrics import read_metrics
from pace_agent.report.plots import draw_run
from pace_agent.report.summary import RunFigures, build_summary, write_summary


def write_outcome(folder: Path, run: RunEnd, *, seconds: float, resume_hint: bool) -> None:
    """Write the summary and the picture of an ended run, and print the last lines."""
    rows = read_metrics(folder / "metrics.jsonl")
    summary = summarise_run(run, rows, seconds)
    write_summary(folder / "summary.json", summary)
    drawn = draw_run(rows, folder / "report.png", title=folder.name)
    if drawn.path is None:
        print(f"no report.png: {drawn.reason}")
    print(f"run folder {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if resume_hint:
        print(f"stopped; go on with: pace-agent train --resume {folder}")
    print(last_line(summary))


def summarise_run(run: RunEnd, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The object of `summary.json`."""
    pool, trained = run.pool, run.ledger["trained"]
    staleness = {
        name: getattr(pool, name)
        for name in ("generation", "waiting", "effective", "token_mean", "length_ratio", "tail_share")
    }
    return build_summary(
        RunFigures(
            step_rewards=[row.get("reward/mean") for row in rows],
            seconds=seconds,
            policy_version=run.policy_version,
            trained=trained,
            multi_version=round((pool.multi_version_share or 0.0) * trained),
            interrupted_total=run.interrupted_total,
            ledger=run.ledger,
            staleness=staleness,
            reasons={f"staleness.{name}": reason for name, reason in pool.reasons.items()},
            extra={"ledger_reasons": run.reasons, "incarnation": run.incarnation},
        )
    )


def last_line(summary: dict[str, Any]) -> str:
    """Reward, share of rollouts over several versions, the ledger's balance, and where the staleness came from."""
    ledger, staleness = summary["ledger"], summary["staleness"]
    states = " + ".join(f"{name} {count}" for name, count in ledger.items() if name != "submitted")

    def shown(value: float | None, form: str) -> str:
        return "undefined" if value is None else format(value, form)

    return (
        f"reward {shown(summary['reward_first5'], '.3f')} -> {shown(summary['reward_last10'], '.3f')}"
        f" | over several versions {shown(summary['multi_version_share'], '.0%')}"
        f" | ledger {ledger['submitted']} = {states}"
        f" | staleness generation {shown(staleness['generation'], '.2f')}"
        f" + waiting {shown(staleness['waiting'], '.2f')}"
        f" = {shown(staleness['effective'], '.2f')} versions"
    )
