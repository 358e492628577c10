import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from pace_agent.errors import UserError
from pace_agent.report.files import open_run_folder, write_atomic
from pace_agent.report.metrics import MetricsWriter, read_metrics
from pace_agent.report.plots import draw_run
from pace_agent.report.progress import Progress, sparkline
from pace_agent.report.summary import LEDGER_STATES, RunFigures, build_summary, write_summary

STEP = {
    "reward/mean": 0.5,
    "trainer/policy_version": 7,
    "pool/occupancy": 140,
    "pool/target": 128,
    "staleness/generation_mean": 1.0,
    "staleness/waiting_mean": 0.25,
    "staleness/effective_mean": 1.25,
    "rollout/interrupted_total": 33,
    "rollout/tokens_per_second": 5321.4,
}


# Files


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \ud800")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomic(tmp_path / "atomic", "")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")]
    assert modes[0] == modes[1]


def test_a_new_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    assert open_run_folder(path) == path
    assert list(path.iterdir()) == []
    (path / "config.toml").write_text("")
    with pytest.raises(UserError, match=r"already holds a run.*--resume"):
        open_run_folder(path)


def test_a_run_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir = .*file/run' can't be written"):
        open_run_folder(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_a_run_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="can't be written"):
        open_run_folder(tmp_path / "run")


# Metrics


def test_metrics_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"reward/mean": 0.5, "pool/length_ratio": float("nan")})
        assert read_metrics(path) == [{"step": 1, "reward/mean": 0.5, "pool/length_ratio": None}]
        writer.write(2, {"reward/mean": 0.75})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"line": 1.0})
    with path.open("a") as file:
        file.write('{"step": 6, "li')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    with MetricsWriter(path, after=3) as writer:
        writer.write(4, {"line": 2.0})
    assert [(row["step"], row["line"]) for row in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", after=3) as writer:
        writer.write(4, {})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 4}]


def test_a_broken_line_in_the_middle_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


# Summary


def figures(**changes: Any) -> RunFigures:
    plain: dict[str, Any] = {
        "step_rewards": [0.1, 0.2, 0.3, 0.4, 0.5, *[0.8] * 10],
        "seconds": 12.3456,
        "policy_version": 15,
        "trained": 200,
        "multi_version": 50,
        "interrupted_total": 70,
        "ledger": dict.fromkeys(LEDGER_STATES, 1) | {"submitted": 8},
        "staleness": {
            "generation": 1.0,
            "waiting": 0.5,
            "effective": 1.5,
            "token_mean": 1.4,
            "length_ratio": 0.98,
            "tail_share": None,
        },
        "reasons": {"staleness.tail_share": "fewer than 20 long rollouts"},
    }
    return RunFigures(**(plain | changes))


def test_summary(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", build_summary(figures(extra={"seed": 3})))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "reward_first5": pytest.approx(0.3),
        "reward_last10": pytest.approx(0.8),
        "steps": 15,
        "seconds": 12.35,
        "policy_version": 15,
        "multi_version_share": 0.25,
        "interrupted_total": 70,
        "ledger": dict.fromkeys(LEDGER_STATES, 1) | {"submitted": 8},
        "staleness": figures().staleness,
        "seed": 3,
        "reasons": {"staleness.tail_share": "fewer than 20 long rollouts"},
    }


def test_a_run_that_trained_nothing_says_so() -> None:
    summary = build_summary(figures(step_rewards=[None], trained=0, multi_version=0))
    assert summary["multi_version_share"] is None
    assert summary["reward_first5"] is None
    assert summary["reasons"].keys() >= {"multi_version_share", "reward_first5", "reward_last10"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reasons": {}}, r"no reason is given for the empty staleness\.tail_share"),
        ({"ledger": dict.fromkeys(LEDGER_STATES, 1)}, "the ledger lost"),
        ({"ledger": {"submitted": 0}}, "ledger must have exactly"),
        ({"staleness": {}}, "staleness must have exactly"),
    ],
)
def test_a_summary_that_hides_something_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_summary(figures(**changes))


# Display


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream) as progress:
        progress.note(
            "a note that is longer than eighty characters and must stay on one line, [whatever] it says, really"
        )
        progress.update({"step": 1, **STEP})
        progress.update({"step": 2, "reward/mean": 0.625})
    note, first, second = stream.getvalue().splitlines()
    assert note.endswith("[whatever] it says, really")
    assert first.startswith(
        "step 1/10  reward 0.500  version 7  pool 140/128  staleness 1.00+0.25=1.25  interrupted 33  5,321 tok/s  left"
    )
    assert "\x1b" not in first
    assert second.startswith("step 2/10  reward 0.625  version 7")


def test_a_figure_that_never_came_is_a_dash() -> None:
    progress = Progress(10, stream=io.StringIO())
    progress.update({"step": 1})
    assert "reward -" in progress.line()
    assert "staleness -  " in progress.line()


def test_time_left_counts_only_the_steps_of_this_process() -> None:
    progress = Progress(100, stream=io.StringIO(), done=90)
    assert progress.seconds_left() is None
    progress._started -= 10.0
    progress.update({"step": 95})
    left = progress.seconds_left()
    assert left is not None
    assert left == pytest.approx(10.0, abs=1.0)


def test_the_panel_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(10, stream=stream, title="pace/Shop-v0") as progress:
        progress.note("hello")
        progress.update({"step": 1, **STEP})
        progress.update({"step": 4, **STEP, "reward/mean": 0.75})
    shown = stream.getvalue()
    for part in ("pace/Shop-v0", "hello", "policy version", "4/10", "0.750", "140 of 128", "1.00+0.25=1.25", "▁█"):
        assert part in shown


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


# Picture


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            **STEP,
            "pool/budget": 3,
            "pool/length_ratio": 0.98,
            "pool/tail_share": None if step < 3 else 0.9,
        }
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_picture_is_drawn(count: int, tmp_path: Path) -> None:
    drawn = draw_run(rows(count), tmp_path / "report.png", title="a run")
    assert drawn.path == tmp_path / "report.png"
    data = drawn.path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_gaps_are_fine(tmp_path: Path) -> None:
    sparse: list[dict[str, float]] = [{"step": step} for step in range(1, 15)]
    sparse[4] |= {"reward/mean": 0.5, "eval/reward_mean": 0.4}
    assert draw_run(sparse, tmp_path / "report.png").path is not None


def test_no_picture_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw_run([], tmp_path / "report.png").reason
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = draw_run(rows(2), tmp_path / "report.png")
    assert drawn.path is None
    assert "pace-agent[report]" in drawn.reason
    assert list(tmp_path.iterdir()) == []
