"""The policies that are compared with each other, by the names that the command line takes."""

from collections.abc import Mapping
from typing import Any

from pace_agent.errors import UserError, did_you_mean
from pace_agent.pool import PoolOptions

RULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"policy": "sync"},
    "unfiltered": {"policy": "unfiltered"},
    "max_staleness": {"policy": "max_staleness", "max_staleness": 4},
    "bounded_admission": {"policy": "bounded_admission", "eta": 4},
    "drop_oldest": {"policy": "drop_oldest"},
    "pace-none": {"policy": "pace", "fairness": "none"},
    "pace-length": {"policy": "pace", "fairness": "length"},
}
"""Pool options of every rule; `pace-length` is the default of training."""


def rule_options(name: str, **options: Any) -> PoolOptions:
    """The pool's options under this rule, the others as given."""
    if name not in RULES:
        raise UserError(f"policies can't name {name!r}.{did_you_mean(name, RULES)}")
    return PoolOptions(**(dict(options) | dict(RULES[name])))
