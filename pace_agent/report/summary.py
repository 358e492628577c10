"""`summary.json`: a run in one object.

A figure that too little data defines is null, and `reasons` says why: a null without a reason is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pace_agent.report.files import write_atomic

LEDGER_STATES = ("submitted", "running", "grouping", "pooled", "drawn", "trained", "rejected", "failed", "cancelled")
STALENESS_KEYS = ("generation", "waiting", "effective", "token_mean", "length_ratio", "tail_share")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a finished run knows about itself.

    `step_rewards` holds the mean reward of each step in order, None for a step without a completed rollout. The
    staleness figures are in versions, over what was trained; `length_ratio` and `tail_share` are ratios of trained over
    generated. `reasons` explains each None, by its dotted key.
    """

    step_rewards: Sequence[float | None]
    seconds: float
    policy_version: int
    trained: int
    multi_version: int
    """Of the trained trajectories, those with tokens of more than one version."""
    interrupted_total: int
    ledger: Mapping[str, int]
    staleness: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys, as they are."""


def build_summary(figures: RunFigures) -> dict[str, Any]:
    """The object of `summary.json`.

    Raises:
        ValueError: a state or a staleness figure is missing or unknown, the ledger does not balance, or a null has no
            reason.
    """
    _check_names("ledger", figures.ledger, LEDGER_STATES)
    _check_names("staleness", figures.staleness, STALENESS_KEYS)
    submitted = figures.ledger["submitted"]
    accounted = sum(figures.ledger[state] for state in LEDGER_STATES[1:])
    if submitted != accounted:
        raise ValueError(f"the ledger lost {submitted - accounted} trajectories: {dict(figures.ledger)}")
    rewards = figures.step_rewards
    reasons = dict(figures.reasons)
    share = figures.multi_version / figures.trained if figures.trained else None
    if share is None:
        reasons.setdefault("multi_version_share", "nothing was trained")
    summary: dict[str, Any] = {
        "reward_first5": _mean(rewards[:5], "reward_first5", reasons),
        "reward_last10": _mean(rewards[-10:], "reward_last10", reasons),
        "steps": len(rewards),
        "seconds": round(figures.seconds, 2),
        "policy_version": figures.policy_version,
        "multi_version_share": share,
        "interrupted_total": figures.interrupted_total,
        "ledger": {state: figures.ledger[state] for state in LEDGER_STATES},
        "staleness": {key: figures.staleness[key] for key in STALENESS_KEYS},
        **figures.extra,
    }
    empty = [key for key in ("reward_first5", "reward_last10", "multi_version_share") if summary[key] is None]
    empty += [f"staleness.{key}" for key in STALENESS_KEYS if figures.staleness[key] is None]
    if unexplained := [key for key in empty if not reasons.get(key)]:
        raise ValueError(f"no reason is given for the empty {', '.join(unexplained)}")
    return {**summary, "reasons": {key: reasons[key] for key in empty}}


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def _mean(values: Sequence[float | None], key: str, reasons: dict[str, str]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return fmean(known)
    reasons.setdefault(key, "no step had a completed rollout")
    return None


def _check_names(what: str, given: Mapping[str, Any], wanted: Sequence[str]) -> None:
    if set(given) != set(wanted):
        raise ValueError(f"{what} must have exactly {sorted(wanted)}, got {sorted(given)}")
