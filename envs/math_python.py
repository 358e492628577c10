r"""MathPython: problems of arithmetic, number theory and algebra, worked out with Python and answered in `\boxed{}`."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

from pace_agent.envs.grading.math import grade
from pace_agent.envs.tasks import Procedural, make_task
from pace_agent.envs.tool_env import ToolEnv
from pace_agent.tools.python import python
from pace_agent.types import Task

Problem = tuple[str, int | Fraction]
"""The question and its exact answer."""


def expression(rng: random.Random) -> Problem:
    a, b, c, d = (rng.randint(100, 9999) for _ in range(4))
    return f"What is ${a} \\cdot {b} - {c} \\cdot {d}$?", a * b - c * d


def fractions(rng: random.Random) -> Problem:
    parts = [Fraction(rng.randint(1, 40), rng.randint(2, 40)) for _ in range(3)]
    shown = " + ".join(f"\\frac{{{part.numerator}}}{{{part.denominator}}}" for part in parts)
    return f"What is ${shown}$ as a fraction in lowest terms?", sum(parts, Fraction(0))


def remainder(rng: random.Random) -> Problem:
    base, exponent, modulus = rng.randint(2, 99), rng.randint(50, 999), rng.randint(11, 997)
    return f"What is the remainder of ${base}^{{{exponent}}}$ divided by {modulus}?", pow(base, exponent, modulus)


def digit_sum(rng: random.Random) -> Problem:
    base, exponent = rng.randint(2, 30), rng.randint(20, 120)
    return f"What is the sum of the decimal digits of ${base}^{{{exponent}}}$?", sum(map(int, str(base**exponent)))


def divisors(rng: random.Random) -> Problem:
    number = rng.randint(1000, 20_000)
    return f"How many positive divisors does {number} have?", sum(number % each == 0 for each in range(1, number + 1))


def greatest_common_divisor(rng: random.Random) -> Problem:
    factor, a, b = rng.randint(10, 500), rng.randint(100, 9999), rng.randint(100, 9999)
    a, b = factor * a, factor * b
    return f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)


def multiples(rng: random.Random) -> Problem:
    limit, a, b = rng.randint(500, 9999), rng.randint(3, 20), rng.randint(21, 60)
    total = sum(each for each in range(1, limit) if each % a == 0 or each % b == 0)
    return f"What is the sum of all positive integers below {limit} that are multiples of {a} or {b}?", total


def linear(rng: random.Random) -> Problem:
    a, c = rng.sample(range(2, 60), 2)
    b, d = rng.randint(-99, 99), rng.randint(-99, 99)
    return f"Solve ${a}x{plus(b)} = {c}x{plus(d)}$ for $x$.", Fraction(d - b, a - c)


def system(rng: random.Random) -> Problem:
    x, y = rng.randint(-50, 50), rng.randint(-50, 50)
    a, b, c = rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 20)
    d = b * c // a + rng.randint(1, 9)  # never parallel: a d differs from b c
    first, second = f"{a}x{plus(b, 'y')} = {a * x + b * y}", f"{c}x{plus(d, 'y')} = {c * x + d * y}"
    return f"If ${first}$ and ${second}$, what is $x - y$?", x - y


def larger_root(rng: random.Random) -> Problem:
    p, q = rng.sample(range(-40, 41), 2)
    return f"What is the larger root of $x^2{plus(-p - q, 'x')}{plus(p * q)} = 0$?", max(p, q)


def plus(value: int, symbol: str = "") -> str:
    """A further term of a sum; nothing for 0."""
    if value == 0:
        return ""
    size = "" if symbol and abs(value) == 1 else str(abs(value))
    return f" {'+' if value > 0 else '-'} {size}{symbol}"


KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    expression,
    fractions,
    remainder,
    digit_sum,
    divisors,
    greatest_common_divisor,
    multiples,
    linear,
    system,
    larger_root,
)


def math_task(rng: random.Random) -> Task:
    question, answer = rng.choice(KINDS)(rng)
    return make_task(question, answer=written(answer))


def written(value: int | Fraction) -> str:
    """A number in LaTeX."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


class MathPythonEnv(ToolEnv):
    """Solve a mathematical problem with Python; reward 1 if the final turn's last box holds the right answer."""

    system = (
        "Solve the problem. Use the python tool to compute. When you know the answer, "
        "reply without a tool call and put it in \\boxed{}."
    )
    tasks = Procedural(math_task)
    tools = (python,)

    async def reward(self, answer: str, task: Task) -> float:
        # Only the final turn is read: boxes in the question or in what a tool printed don't count.
        return await grade(gold=str(task.answer), prediction=answer)
