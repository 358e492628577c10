"""`trajectories.jsonl`: every rollout once, readable, with its fate.

What always holds:

* A line is written when the fate is known (trained, rejected, failed, cancelled), never before and never twice.
* The file holds the surviving line alone. When a run resumes from a checkpoint, what was written after that checkpoint
  moves to `rolled_back/` beside it: nothing disappears, and nothing counts twice.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from pace_agent.types import Message, Trajectory


def record(trajectory: Trajectory, *, fate: str, reason: str = "", step: int, **extra: Any) -> dict[str, Any]:
    """One line: messages, stamps per turn as [version, start, end], reward, stop reason, fate."""
    return {
        "id": trajectory.id,
        "group": trajectory.group_id,
        "task": trajectory.task.id,
        "attempt": trajectory.attempt,
        "fate": fate,
        "reason": reason,
        "step": step,
        "reward": trajectory.reward,
        "stop": str(trajectory.stop),
        "error": trajectory.error,
        "completed_version": trajectory.completed_version,
        "seconds": round(trajectory.completed_at - trajectory.started_at, 4),
        "completed_at": round(trajectory.completed_at, 4),
        "turns": [
            {
                "environment_tokens": len(turn.prompt_ids),
                "sampled_tokens": len(turn.output_ids),
                "stamps": [[span.version, span.start, span.end] for span in turn.spans],
                "finish": turn.finish,
                "segments": turn.segments,
                "generate_seconds": round(turn.generate_seconds, 4),
                "env_seconds": round(turn.env_seconds, 4),
            }
            for turn in trajectory.turns
        ],
        "metrics": dict(trajectory.metrics),
        "messages": [_readable(message) for message in trajectory.messages],
        **extra,
    }


def _readable(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        out["name"] = message.name
    return out


class Journal:
    """Appends lines; `state_dict` is the length that a checkpoint vouches for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        # Several times faster than the standard library's encoder, and a step writes hundreds of lines.
        self._file.writelines(to_json(line, fallback=str, inf_nan_mode="null") + b"\n" for line in lines)

    def flush(self) -> None:
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self.path.stat().st_size}

    def roll_back(self, kept: int, *, incarnation: int) -> None:
        """Keep the `kept` bytes that the checkpoint vouches for; move the rest to `rolled_back/`.

        `incarnation` is that of the line that begins now; it must be new.
        """
        self._file.close()
        with self.path.open("r+b") as file:
            file.seek(kept)
            tail = file.read()
            if tail:
                aside = self.path.parent / "rolled_back" / f"{self.path.stem}.{incarnation}.jsonl"
                aside.parent.mkdir(exist_ok=True)
                with aside.open("xb") as copy:
                    copy.write(tail)
            file.truncate(kept)
        self._file = self.path.open("ab")

    def close(self) -> None:
        self._file.close()


def rolled_back(path: Path) -> list[int]:
    """The incarnations for which lines of this folder's journals were moved aside."""
    return [int(aside.name.split(".")[-2]) for aside in path.parent.glob("rolled_back/*.*.jsonl")]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a torn last line (a killed run) is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
