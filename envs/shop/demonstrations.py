"""Conversations in the shop by a player who knows the way but often slips: what a small model learns the format from.

What always holds:

* Every tool answer in a conversation was given by the environment itself, so it reads as it will in a rollout.
* Only tasks of the train split are played, and the same count and seed give the same conversations.
* At most one slip per decision, at the rates of `SLIPS`. A perfect player would leave nothing to learn by reward.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pace_agent.envs.bridge import run_sync
from pace_agent.envs.shop.env import PRICES, ShopEnv
from pace_agent.tools.parsers import get_parser
from pace_agent.types import Message, Task

_parse = get_parser("hermes")


class Slip(StrEnum):
    """One way to get a decision wrong."""

    GUESS = "guess"
    """A price is made up, not looked up."""
    STOP_EARLY = "stop_early"
    """The answer comes before the sum: a price, or the prices without their counts."""
    WRONG_OPERATION = "wrong_operation"
    """An addition where a multiplication belongs, or the other way round."""
    WRONG_NUMBER = "wrong_number"
    """A number is copied with a wrong digit."""
    BROKEN_JSON = "broken_json"
    """A call that can't be read; the environment says so, and the player tries again."""


SLIPS: Mapping[Slip, float] = {
    Slip.GUESS: 0.18,
    Slip.STOP_EARLY: 0.13,
    Slip.WRONG_OPERATION: 0.08,
    Slip.WRONG_NUMBER: 0.05,
    Slip.BROKEN_JSON: 0.05,
}
"""Chance of each slip at a decision where it is possible."""

AT_LOOK_UP = (Slip.GUESS, Slip.STOP_EARLY, Slip.BROKEN_JSON)
AT_SUM = (Slip.STOP_EARLY, Slip.WRONG_OPERATION, Slip.WRONG_NUMBER, Slip.BROKEN_JSON)
AT_ANSWER = (Slip.WRONG_NUMBER,)


@dataclass(frozen=True, slots=True)
class Decision:
    """The slips that were possible, and the one that happened."""

    possible: tuple[Slip, ...]
    slip: Slip | None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole conversation; the assistant's messages hold the text that a model would have to write."""

    task: Task
    messages: tuple[Message, ...]
    decisions: tuple[Decision, ...]
    reward: float


def demonstrations(count: int, *, seed: int = 0, slips: Mapping[Slip, float] = SLIPS) -> list[Demonstration]:
    """Play the first `count` tasks of the train split."""
    return run_sync(_play_all(count, seed, slips))


def tool_schemas() -> list[dict[str, Any]]:
    """The shop's tools, as every episode shows them."""
    return ShopEnv().toolset.schemas()


async def _play_all(count: int, seed: int, slips: Mapping[Slip, float]) -> list[Demonstration]:
    env = ShopEnv()
    try:
        played = []
        for index in range(count):
            player = _Player(env, random.Random(f"{seed}:{index}"), slips)
            played.append(await player.play(ShopEnv.tasks.task("train", index)))
        return played
    finally:
        await env.aclose()


class _Player:
    """Plays one episode."""

    def __init__(self, env: ShopEnv, rng: random.Random, slips: Mapping[Slip, float]) -> None:
        self.env = env
        self.rng = rng
        self.slips = slips
        self.messages: list[Message] = []
        self.decisions: list[Decision] = []
        self.reward = 0.0

    async def play(self, task: Task) -> Demonstration:
        observation, _ = await self.env.areset(options={"task": task})
        self.messages += observation
        total = await self._total(task.data["basket"])
        if self._decide(*AT_ANSWER) is Slip.WRONG_NUMBER:
            total = self._other(total)
        await self._say(f"Answer: {total}")
        return Demonstration(task, tuple(self.messages), tuple(self.decisions), self.reward)

    async def _total(self, basket: Sequence[tuple[str, int]]) -> int:
        terms: list[list[int]] = []
        for item, count in basket:
            price = await self._price(item)
            if price is None:
                return self._early(terms)
            terms.append([count, price])
        return await self._sum(terms)

    async def _price(self, item: str) -> int | None:
        """What the player takes for the price; None to look up nothing more."""
        slip = self._decide(*AT_LOOK_UP)
        if slip is Slip.STOP_EARLY:
            return None
        if slip is Slip.GUESS:
            return self.rng.choice(PRICES)
        return int(await self._call(slip is Slip.BROKEN_JSON, "price", item=item))

    async def _sum(self, terms: list[list[int]]) -> int:
        slip = self._decide(*AT_SUM)
        if slip is Slip.STOP_EARLY:
            return self._early(terms)
        if slip is Slip.WRONG_NUMBER:
            term, place = self.rng.choice(terms), self.rng.randrange(2)
            term[place] = self._other(term[place])
        expression = "+".join("*".join(map(str, term)) for term in terms)
        if slip is Slip.WRONG_OPERATION:
            place = self.rng.choice([place for place, sign in enumerate(expression) if sign in "+*"])
            expression = expression[:place] + ("*" if expression[place] == "+" else "+") + expression[place + 1 :]
        return int(await self._call(slip is Slip.BROKEN_JSON, "calculator", expression=expression))

    def _early(self, terms: Sequence[Sequence[int]]) -> int:
        known = [price for _count, price in terms] or [self.rng.choice(PRICES)]
        return self.rng.choice([known[0], sum(known)])

    async def _call(self, broken: bool, name: str, **arguments: Any) -> str:
        """Call a tool, after a try that can't be read where `broken`."""
        call = "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        if broken:  # without its last brace, or without the quote before it
            await self._say(call.replace("}}", "}") if self.rng.random() < 0.5 else call.replace('"}}', "}}"))
        return await self._say(call)

    async def _say(self, text: str) -> str:
        """Take a turn; returns what the environment answered."""
        observation, reward, _terminated, _truncated, _info = await self.env.astep(_parse(text))
        self.messages += [Message("assistant", text), *observation]
        self.reward += reward
        return observation[-1].content if observation else ""

    def _decide(self, *possible: Slip) -> Slip | None:
        """At most one slip. A second unreadable call is never made: it would not fit the turns."""
        if any(decision.slip is Slip.BROKEN_JSON for decision in self.decisions):
            possible = tuple(slip for slip in possible if slip is not Slip.BROKEN_JSON)
        draw, slip = self.rng.random(), None
        for each in possible:
            draw -= self.slips[each]
            if draw < 0:
                slip = each
                break
        self.decisions.append(Decision(possible, slip))
        return slip

    def _other(self, number: int) -> int:
        """The number with one digit changed; the first one does not become 0."""
        digits = str(number)
        place = self.rng.randrange(len(digits))
        digit = self.rng.choice([each for each in "123456789" if each != digits[place]])
        return int(digits[:place] + digit + digits[place + 1 :])
