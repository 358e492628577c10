"""Small real parts for tests of the rollout side: a chat format over characters and an environment that counts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pace_agent.types import Message, Split, Task

END = 3


class CharChat:
    """One id per character; a turn ends with id 3."""

    stop_token_ids = (END,)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return [ord(c) for message in messages for c in f"{message.role}:{message.content}\n"] + [ord(">")]

    def suffix_ids(self, messages: Sequence[Message], *, last_output: Sequence[int]) -> list[int]:
        return [ord("\n"), *self.prompt_ids(messages)]

    def decode(self, output_ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in output_ids if i != END)


def say(text: str) -> list[int]:
    """The ids of a turn that ends by itself."""
    return [*map(ord, text), END]


def parse(text: str) -> Message:
    """Every turn is plain text."""
    return Message("assistant", text)


@dataclass
class CountingEnv:
    """Asks `rounds` times, then rewards by `reward(answers)`; counts how often it was closed."""

    rounds: int = 2
    rewards: Any = 1.0
    delay: float = 0.0
    fail_at: int | None = None
    closed: int = 0
    opened: list["CountingEnv"] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    task: Task | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self.task = (options or {})["task"]
        return (Message("user", self.task.prompt),), {}

    async def astep(self, action: Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(self.delay)
        self.answers.append(action.content)
        if self.fail_at == len(self.answers):
            raise ValueError("broken on purpose")
        if len(self.answers) < self.rounds:
            return (Message("user", "again"),), 0.0, False, False, {"metrics": {"rounds": 1.0}}
        value = self.rewards(self) if callable(self.rewards) else self.rewards
        return (), value, True, False, {"metrics": {"rounds": 1.0}}

    async def aclose(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class NumberTasks:
    """Endless tasks, or `count` of them."""

    count: int | None = None

    def size(self, split: Split) -> int | None:
        return self.count

    def task(self, split: Split, index: int) -> Task:
        return Task(id=f"{split}-{index}", prompt=f"n{index}", answer=index)
