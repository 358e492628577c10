"""A hidden number, found by asking: the whole of a custom environment. Copy this file and change what you like.

pace-agent rollout --env examples/number_env.py:NumberEnv
"""

import random

from pace_agent.envs import Procedural, Task, ToolEnv, make_task, tool


def number_task(rng: random.Random) -> Task:
    low = rng.randrange(1000)
    high = low + rng.randint(10, 60)
    return make_task(f"Find the hidden number from {low} to {high}.", answer=rng.randint(low, high))


class NumberEnv(ToolEnv):
    """Find a hidden number with few questions."""

    system = "Ask with the tool until you are sure, then reply with the number alone."
    tasks = Procedural(number_task)

    def start(self, task: Task) -> None:
        self.asked = 0

    @tool
    def compare(self, number: int) -> str:
        """Tell whether the hidden number is lower than, higher than or equal to yours.

        Args:
            number: Your guess.
        """
        self.asked += 1
        hidden = self.task.answer
        return "lower" if hidden < number else "higher" if hidden > number else "equal"

    def reward(self, answer: str, task: Task) -> float:
        return 0.9 ** max(0, self.asked - 6) if answer.strip() == str(task.answer) else 0.0
