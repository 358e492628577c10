r"""Reading answers out of text: the last `\boxed{...}`, the final value of a worked solution, words. Pure functions."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WRAP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Z]|[^\W\d_]{3,}(?: [^\W\d_]+)*")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces matched; None without one.

    A box that is never closed does not count, and one inside another is part of it.
    """
    found: str | None = None
    position = 0
    while match := _BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            position = match.end()
        else:
            found, position = text[match.end() : end], end + 1
    return found


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


def final_value(gold: str) -> str:
    """A gold answer without its worked solution: what stands in its last box, or behind the last `####`."""
    box = last_box(gold)
    return (gold.rpartition("####")[2] if box is None else box).strip()


def tidy(answer: str) -> str:
    """An answer without dollar signs, spaces around it, and a full stop at its end."""
    return answer.replace("\\$", "").strip().strip("$").strip().removesuffix(".").strip()


def is_words(answer: str) -> bool:
    """Whether an answer is a choice (`B`) or words (`east`), which are not to be read as products of variables."""
    return _WORDS.fullmatch(as_words(answer)) is not None


def as_words(answer: str) -> str:
    """The answer as plain words: commands for text unwrapped, parentheses around a choice left out."""
    plain = " ".join(_WRAP.sub(r"\1", tidy(answer)).split())
    if len(plain) == 3 and plain[0] == "(" and plain[2] == ")":
        plain = plain[1]
    return tidy(plain)


def same_words(gold: str, answer: str) -> bool:
    return as_words(gold).casefold() == as_words(answer).casefold()
