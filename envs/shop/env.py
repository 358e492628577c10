"""Shop: the smallest task that can't be done without its tools.

Somebody buys one or two kinds of things, the price list is hidden, and the total is asked for. The texts are short
because the model that learns it on a CPU reads at most 256 tokens: a look-up for each thing, a sum, and the answer.
"""

import asyncio
import random
import re
from typing import Any

from pace_agent.envs.tasks import Procedural, make_task
from pace_agent.envs.tool_env import ToolEnv
from pace_agent.errors import UserError
from pace_agent.tools.base import ToolError, ToolResult, tool
from pace_agent.tools.calculator import calculator
from pace_agent.types import Task, ToolCall

NAMES = (
    "Ann",
    "Ben",
    "Cal",
    "Dora",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jan",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
)
ITEMS = {
    "apple": "apples",
    "book": "books",
    "box": "boxes",
    "cake": "cakes",
    "coat": "coats",
    "cup": "cups",
    "egg": "eggs",
    "fish": "fishes",
    "hat": "hats",
    "key": "keys",
    "lamp": "lamps",
    "nut": "nuts",
    "pear": "pears",
    "pen": "pens",
    "pie": "pies",
    "plum": "plums",
    "ring": "rings",
    "rug": "rugs",
    "toy": "toys",
    "vase": "vases",
}
"""Things for sale, one and many."""
COUNTS = range(2, 10)
PRICES = range(3, 50)

ANSWER = re.compile(r"Answer: (\d{1,9})")


def shop_task(rng: random.Random) -> Task:
    """One shopping list. `data` holds `basket` ([[item, count], ...]) and `prices` ({item: price}), both hidden."""
    items = rng.sample(sorted(ITEMS), rng.choice((1, 2)))
    basket: list[tuple[str, int]] = [(item, rng.choice(COUNTS)) for item in items]
    prices = {item: rng.choice(PRICES) for item in items}
    bought = " and ".join(f"{count} {ITEMS[item]}" for item, count in basket)
    total = sum(count * prices[item] for item, count in basket)
    prompt = f"{rng.choice(NAMES)} buys {bought}. What is the total price?"
    return make_task(prompt, answer=total, basket=[list(each) for each in basket], prices=prices)


def parse_answer(text: str) -> int | None:
    """The N of `Answer: N`, if that is the last line and the only such line of a final turn; else None."""
    lines = text.strip().splitlines()
    marked = [line for line in lines if "Answer:" in line]
    match = ANSWER.fullmatch(lines[-1].strip()) if lines and len(marked) == 1 else None
    return int(match[1]) if match else None


class ShopEnv(ToolEnv):
    """Buy one or two kinds of things from a shop with a hidden price list; reward 1 for the right total.

    `tool_delay` and `slow_delay` are seconds, `slow_share` is the share of calls that take `slow_delay` instead: they
    imitate slow tools, and which calls are slow follows from the seed.
    """

    system = "Look up each price, work out the total, then write Answer: N."
    tasks = Procedural(shop_task)
    tools = (calculator,)

    def __init__(self, *, tool_delay: float = 0, slow_share: float = 0, slow_delay: float = 0, **options: Any) -> None:
        if min(tool_delay, slow_delay) < 0 or not 0 <= slow_share <= 1:
            raise UserError("tool_delay and slow_delay can't be negative, and slow_share lies between 0 and 1")
        super().__init__(**options)
        self.tool_delay, self.slow_share, self.slow_delay = tool_delay, slow_share, slow_delay

    @tool
    def price(self, item: str) -> int:
        """Price of one item."""
        prices: dict[str, int] = self.task.data["prices"]
        for one, price in prices.items():
            if item.strip().lower() in (one, ITEMS[one]):
                return price
        raise ToolError(f"no price for {item!r}")

    def next_delay(self) -> float:
        """Seconds that the next call takes."""
        slow = self.slow_share > 0 and self.np_random.random() < self.slow_share
        return self.slow_delay if slow else self.tool_delay

    async def run_tool(self, call: ToolCall) -> ToolResult:
        if delay := self.next_delay():
            await asyncio.sleep(delay)
        return await super().run_tool(call)

    def reward(self, answer: str, task: Task) -> float:
        return float(parse_answer(answer) == task.answer)
