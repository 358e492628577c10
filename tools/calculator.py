"""A calculator that no expression can stall or break.

Expressions are read with `ast` and only numbers and arithmetic are evaluated. Length, depth and the size of every
number on the way are bounded before anything large is computed.
"""

import ast
import math
import operator
import re
from collections.abc import Callable

from pace_agent.tools.base import ToolError, tool

Number = int | float

MAX_LENGTH = 500
"""Characters of an expression."""
MAX_NESTING = 40
"""Levels of parentheses."""
MAX_DEPTH = 200
"""Levels of operators; a sum of n terms has n."""
MAX_BITS = 1024
"""Bits of any whole number, operands and results alike."""

_LETTERS = re.compile(r"[\d\seE_.+*/%()-]*", re.ASCII)
_ALLOWED = "only numbers, + - * / // % ** and parentheses are allowed"

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression; ToolError for everything else."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    if _nesting(expression) > MAX_NESTING:
        raise ToolError(f"the expression is nested more than {MAX_NESTING} levels deep")
    # Checked before parsing, which warns of words that touch a number ("1if 2else 3").
    if not _LETTERS.fullmatch(expression):
        raise ToolError(_ALLOWED)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{_shown(expression)} is not an arithmetic expression") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def _nesting(expression: str) -> int:
    """Open parentheses at the deepest point; checked before parsing, where deep nesting costs the most."""
    depth = deepest = 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError("the expression has too many operators")
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes() | None):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case _:
            pass
    raise ToolError(_ALLOWED)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        # Checked first: computing the power is what must not happen.
        if abs(base) > 1 and exponent * (abs(base).bit_length() - 1) > MAX_BITS:
            raise ToolError("the result is too large")
        return _bounded(base**exponent)
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("a fractional power of a negative number has no real value")
    return _bounded(result)


def _bounded(number: Number) -> Number:
    if isinstance(number, int):
        if number.bit_length() > MAX_BITS:
            raise ToolError("the number is too large")
    elif not math.isfinite(number):
        raise ToolError("the result is not a finite number")
    return number


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def written(number: Number) -> str:
    """Whole numbers without a point (6/2 is 3), others with up to 12 significant digits."""
    if isinstance(number, int):
        return str(number)
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:.12g}"


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression like 3*7+2*4."""
    return written(evaluate(expression))
