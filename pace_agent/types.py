"""The data that travels between the rooms: messages, turns, stamps, trajectories, groups.

What always holds:

* A trajectory is one growing list of token ids. `loss_mask`, `rollout_logprobs` and `versions` have its length.
* Sampled ids are stored as the engine returned them; nothing decodes and encodes them again.
* The spans of a turn are contiguous from 0, their versions never fall, and the last `end` is the number of
  sampled tokens of that turn. `Turn` checks this when it is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for.

    `error` is set when the text of the call could not be read; `arguments` is then empty and the call must be
    answered with the error as its observation, never executed.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The shape that chat templates expect."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `name` and `tool_call_id` belong to role `tool`."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The shape that chat templates expect; empty optional fields are left out."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.name:
            out["name"] = self.name
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `prompt` is the first user message; `answer` is hidden from the model; `data` is the environment's.

    `id` identifies the content: two tasks with the same id are the same problem.
    """

    id: str
    prompt: str
    answer: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


class StopReason(StrEnum):
    """Why a rollout ended. The part before the dot is its class, the part after it the cause."""

    TERMINATED = "terminated"
    """The environment reached an end: the answer was given or the task was decided."""
    TRUNCATED_TURNS = "truncated.turns"
    """The limit on turns was reached."""
    TRUNCATED_TOKENS = "truncated.tokens"
    """The limit on sampled tokens, of a turn or of the rollout, was reached. A cut-off tool call is not executed."""
    TRUNCATED_CONTEXT = "truncated.context"
    """The sequence would have outgrown the context."""
    TRUNCATED_TOOL_CALLS = "truncated.tool_calls"
    """The limit on tool calls was reached."""
    TRUNCATED_TIME = "truncated.time"
    """The limit on seconds was reached."""
    TRUNCATED_ENVIRONMENT = "truncated.environment"
    """The environment itself reported `truncated` (a Gymnasium time limit, for one)."""
    FAILED_ENGINE = "failed.engine"
    """The engine could not generate."""
    FAILED_SANDBOX = "failed.sandbox"
    """The sandbox was not available or died for a reason that is not the model's."""
    FAILED_ENVIRONMENT = "failed.environment"
    """The environment raised."""
    FAILED_GRADER = "failed.grader"
    """The reward function raised, or returned None or a number that is not finite."""
    FAILED_EMPTY = "failed.empty"
    """No token was sampled."""
    FAILED_ROLLOUT = "failed.rollout"
    """Our own code raised: a fault of this package."""
    CANCELLED = "cancelled"
    """The run ended or rolled back while this rollout was going on."""

    @property
    def truncated(self) -> bool:
        return self.startswith("truncated")

    @property
    def failed(self) -> bool:
        return self.startswith("failed")

    @property
    def completed(self) -> bool:
        """Terminated or truncated: the trajectory can be scored."""
        return self is StopReason.TERMINATED or self.truncated


Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) of one turn came from `version`."""

    version: int
    start: int
    end: int


def check_spans(spans: Sequence[VersionSpan], n_tokens: int) -> None:
    """Raise ValueError unless the spans are contiguous from 0 to `n_tokens` with versions that never fall."""
    position, version = 0, -1
    for span in spans:
        if span.start != position or span.end <= span.start or span.version < max(version, 0):
            raise ValueError(f"spans must be contiguous from 0 with versions that never fall, got {tuple(spans)}")
        position, version = span.end, span.version
    if position != n_tokens:
        raise ValueError(f"spans end at {position}, but the turn has {n_tokens} sampled tokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment said (`prompt_ids`, mask 0) and what the model answered (`output_ids`, mask 1).

    `logprobs` are those of `output_ids` at the sampling temperature under the versions of `spans`. `segments` counts
    the pieces in which the turn was generated: 1, plus one for every weight update that interrupted it.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish = "stop"
    segments: int = 1
    generate_seconds: float = 0.0
    env_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.output_ids)} sampled tokens")
        check_spans(self.spans, len(self.output_ids))

    def answered(self, seconds: float) -> "Turn":
        """This turn, and the environment took `seconds` to answer it. Half the time of `dataclasses.replace`."""
        return Turn(
            self.prompt_ids,
            self.output_ids,
            self.logprobs,
            self.spans,
            self.finish,
            self.segments,
            self.generate_seconds,
            seconds,
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout, complete or failed. Arrays derived from it are aligned with `ids()`."""

    id: int
    """Unique within the run's surviving line."""
    group_id: int
    task: Task
    env_id: str
    attempt: int
    """0 for the first try at this place in its group."""
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    reward: float | None
    completed_version: int
    """The version published when the rollout completed (`c`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    completed_at: float = 0.0

    def ids(self) -> list[int]:
        out: list[int] = []
        for turn in self.turns:
            out.extend(turn.prompt_ids)
            out.extend(turn.output_ids)
        return out

    def loss_mask(self) -> list[int]:
        """1 for sampled tokens, 0 for prompt and environment tokens."""
        out: list[int] = []
        for turn in self.turns:
            out.extend([0] * len(turn.prompt_ids))
            out.extend([1] * len(turn.output_ids))
        return out

    def rollout_logprobs(self) -> list[float]:
        """Behaviour log-probabilities; 0.0 where the mask is 0."""
        out: list[float] = []
        for turn in self.turns:
            out.extend([0.0] * len(turn.prompt_ids))
            out.extend(turn.logprobs)
        return out

    def versions(self) -> list[int]:
        """Policy version per token; -1 where the mask is 0."""
        out: list[int] = []
        for turn in self.turns:
            out.extend([-1] * len(turn.prompt_ids))
            for span in turn.spans:
                out.extend([span.version] * (span.end - span.start))
        return out

    def sampled_versions(self) -> NDArray[np.int64]:
        """Versions of the sampled tokens alone, shape (n,)."""
        spans = [span for turn in self.turns for span in turn.spans]
        return np.repeat(
            np.array([span.version for span in spans], dtype=np.int64),
            np.array([span.end - span.start for span in spans], dtype=np.int64),
        )

    @property
    def n_sampled(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def interrupted(self) -> int:
        """How often a weight update fell into a turn of this rollout."""
        return sum(turn.segments - 1 for turn in self.turns)

    @property
    def multi_version(self) -> bool:
        return len({span.version for turn in self.turns for span in turn.spans}) > 1


@dataclass(frozen=True, slots=True)
class Group:
    """All members that answered one task, with group-relative advantages computed over the whole group."""

    id: int
    task: Task
    members: tuple[Trajectory, ...]
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.members) != len(self.advantages):
            raise ValueError(f"group {self.id}: {len(self.advantages)} advantages for {len(self.members)} members")


@dataclass(frozen=True, slots=True)
class Sample:
    """What the trainer takes: a trajectory, its advantage, and a weight that multiplies its loss."""

    trajectory: Trajectory
    advantage: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimiser step's samples, drawn when `version` was published.

    `metrics` are the figures of the draw, and of what completed since the last one.
    """

    step: int
    version: int
    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
