"""What an evaluation says: mean reward with its interval, pass@k, and what was truncated or went wrong. Pure functions.

What always holds:

* Every rollout that was asked for is a row, keyed by task and number; none is dropped because it failed.
* A rollout that failed (engine, sandbox, environment, grader) has no reward. The headline mean leaves it out and
  says how many there were; the mean that counts it as 0 stands beside it.
* A truncated rollout keeps the reward that it got. The mean over the finished ones stands beside it.
* The interval is over tasks, not over rollouts: rollouts of one task are not independent.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Self

from pace_agent.types import StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One rollout of one task. `place` counts the tasks, `number` the rollouts of a task; `seed` sampled this one."""

    place: int
    task_id: str
    number: int
    seed: int
    stop: StopReason
    reward: float | None
    turns: int = 0
    tokens: int = 0
    error: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, *, number: int, seed: int) -> Self:
        """Of an evaluation's trajectory, whose group is the task's place."""
        return cls(
            place=trajectory.group_id,
            task_id=trajectory.task.id,
            number=number,
            seed=seed,
            stop=trajectory.stop,
            reward=trajectory.reward,
            turns=len(trajectory.turns),
            tokens=trajectory.n_sampled,
            error=trajectory.error,
        )

    @property
    def scored(self) -> bool:
        return self.stop.completed and self.reward is not None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over task means, and its 95 % interval; without one where fewer than two tasks differ."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The figures of one evaluation. A figure that nothing defines is None, never 0."""

    env_id: str
    tasks: int
    n: int
    """Rollouts asked for of each task; the figures keep this label when some fail."""
    samples: int
    reward: Estimate | None
    """Failed rollouts left out: the headline."""
    reward_errors_as_zero: Estimate | None
    reward_finished: Estimate | None
    """Only rollouts that were neither truncated nor failed."""
    pass_at_k: Mapping[int, float | None]
    """A rollout passes with a reward of at least `success`; a failed one does not pass. None where k exceeds n."""
    success: float
    truncated: int
    errors: int
    errors_by_reason: Mapping[str, int]
    mean_turns: float
    mean_tokens: float

    @property
    def truncated_share(self) -> float:
        """Over the scored rollouts; 0 when there is none."""
        scored = self.samples - self.errors
        return self.truncated / scored if scored else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        out = asdict(self)
        out["pass_at_k"] = {str(k): value for k, value in self.pass_at_k.items()}
        return {
            **out,
            "truncated_share": self.truncated_share,
            "error_policy": "excluded",
            "interval": "95 %, t, tasks",
        }


def pass_at_k(n: int, correct: int, k: int) -> float | None:
    """Chance that at least one of k rollouts, drawn without replacement from n of which `correct` pass, passes.

    1 - C(n - correct, k) / C(n, k), computed exactly (Chen et al. 2021, arXiv 2107.03374). None when k exceeds n:
    there is no unbiased estimate then.
    """
    if not 0 <= correct <= n or k < 1:
        raise ValueError(f"need 0 <= correct <= n and k >= 1, got n={n}, correct={correct}, k={k}")
    return None if k > n else 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def estimate(values_by_task: Iterable[Sequence[float]]) -> Estimate | None:
    """Mean of the tasks' means, with Student's t interval over them. None without a value.

    A task without a value is left out. There is no interval where fewer than two tasks differ: a spread of zero would
    claim certainty.
    """
    means = [fmean(values) for values in values_by_task if values]
    if not means:
        return None
    centre = fmean(means)
    if len(means) < 2 or max(means) == min(means):
        return Estimate(centre)
    half = t_quantile(0.975, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return Estimate(centre, centre - half, centre + half)


def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t, by the expansion in 1/degrees around the normal one; exact for 1 and 2 degrees."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, v = NormalDist().inv_cdf(p), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def summarise(samples: Sequence[EvalSample], *, env_id: str, n: int, success: float = 1.0) -> EvalResult:
    """The figures of `samples`, `n` rollouts of each task.

    Raises:
        ValueError: two samples have the same task and number, or a task has more than `n`.
    """
    by_task: dict[int, list[EvalSample]] = {}
    for sample in samples:
        by_task.setdefault(sample.place, []).append(sample)
    for place, rows in by_task.items():
        numbers = [row.number for row in rows]
        if len(set(numbers)) != len(rows) or len(rows) > n:
            raise ValueError(f"task {place} ({rows[0].task_id}) has rollouts numbered {numbers}, expected {n} of them")
    errors = [sample for sample in samples if not sample.scored]
    finished = [[row.reward for row in rows if row.scored and not row.stop.truncated] for rows in by_task.values()]
    return EvalResult(
        env_id=env_id,
        tasks=len(by_task),
        n=n,
        samples=len(samples),
        reward=estimate(_rewards(row for row in rows if row.scored) for rows in by_task.values()),
        reward_errors_as_zero=estimate(_rewards(rows) for rows in by_task.values()),
        reward_finished=estimate([value for value in values if value is not None] for values in finished),
        pass_at_k={k: _mean_pass(by_task.values(), k, success) for k in _ladder(n)},
        success=success,
        truncated=sum(sample.scored and sample.stop.truncated for sample in samples),
        errors=len(errors),
        errors_by_reason=dict(sorted(Counter(_reason(sample) for sample in errors).items())),
        mean_turns=fmean(sample.turns for sample in samples) if samples else 0.0,
        mean_tokens=fmean(sample.tokens for sample in samples) if samples else 0.0,
    )


def _rewards(rows: Iterable[EvalSample]) -> list[float]:
    return [row.reward if row.scored and row.reward is not None else 0.0 for row in rows]


def _reason(sample: EvalSample) -> str:
    return str(StopReason.FAILED_GRADER if sample.stop.completed else sample.stop)


def _ladder(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({2**power for power in range(n.bit_length())} | {n})


def _mean_pass(tasks: Iterable[Sequence[EvalSample]], k: int, success: float) -> float | None:
    """pass@k averaged over tasks; None when any task has fewer than k rollouts."""
    values = []
    for rows in tasks:
        passed = sum(row.scored and row.reward is not None and row.reward >= success for row in rows)
        value = pass_at_k(len(rows), passed, k)
        if value is None:
            return None
        values.append(value)
    return fmean(values) if values else None


def format_table(result: EvalResult) -> str:
    """The result as a few aligned lines."""
    scored = result.samples - result.errors
    reasons = ", ".join(f"{reason} {count}" for reason, count in result.errors_by_reason.items())
    rows = [
        ("mean reward", _format(result.reward), "failed rollouts left out"),
        ("  errors as 0", _format(result.reward_errors_as_zero), ""),
        ("  finished only", _format(result.reward_finished), "truncated ones left out too"),
        *((f"pass@{k}", "not reported" if v is None else f"{v:.3f}", "") for k, v in result.pass_at_k.items()),
        ("truncated", f"{result.truncated_share:.1%}", f"{result.truncated} of {scored}"),
        ("errors", f"{result.errors}", reasons),
        ("turns, tokens", f"{result.mean_turns:.1f}, {result.mean_tokens:.0f}", "mean of a rollout"),
    ]
    head = f"{result.env_id}: {result.tasks} tasks x {result.n} rollouts (interval: 95 %, over task means)"
    return "\n".join([head, *(f"  {name:<16} {value:<24} {note}".rstrip() for name, value, note in rows)])


def _format(value: Estimate | None) -> str:
    if value is None:
        return "not defined"
    if value.low is None or value.high is None:
        return f"{value.mean:.3f}"
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
