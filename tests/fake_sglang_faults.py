"""What can be made to go wrong on the fake SGLang server, and what it notes down."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Faults:
    """What goes wrong. Counters count down, one per victim; flags stay until they are cleared."""

    fail_updates: int = 0
    """The next weight updates answer 400, `success: false`."""
    fail_after_change: bool = False
    """...and have changed the weights by then."""
    cut_streams: int = 0
    """The next streams break off after `cut_after` tokens, without a final chunk."""
    cut_after: int = 3
    drop_answers: int = 0
    """The next requests are computed to the end, and the connection is cut before the first byte."""
    error_requests: int = 0
    """The next requests answer 500."""
    reject_requests: int = 0
    """The next requests end with an abort of `reject_status`, as from a full queue."""
    reject_status: int = 503
    stall: bool = False
    """Nothing is sampled; control calls are answered."""
    hide_versions: bool = False
    """No `weight_versions`: an older server."""
    fail_calls: dict[str, int] = field(default_factory=dict)
    """By path: the next calls answer 500."""
    hang_calls: dict[str, int] = field(default_factory=dict)
    """By path: the next calls never answer."""
    missing: list[str] = field(default_factory=list)
    """Paths that answer 404: an older server."""


@dataclass
class Seen:
    """One request to /generate, as it came. `finish` is empty until it ended, `tokens` is what it had then."""

    rid: str
    input_ids: list[int]
    max_new_tokens: int | None
    stream: bool
    headers: dict[str, str]
    at: float
    finish: str = ""
    tokens: int = 0


@dataclass
class Call:
    path: str
    body: Any
    at: float
