"""Rendered chat text to ids, where only the template can write control tokens.

What always holds:

* A control token is an added token of the tokenizer that is not mere whitespace. Its id comes out of `ids` only where
  the template's own text held it. In a text that went through `hide` it is ordinary text and gets ordinary ids.
* A text without control tokens gets the ids that the tokenizer itself gives it.
* A tokenizer whose segments can't be encoded apart is refused when `check` runs, not found out in training.

How: `hide` puts a stand-in in place of the first character of every control token in a content. What still matches an
added token in the rendered text is the template's own. Between those, the text gets its characters back and goes
through a copy of the tokenizer that knows no added tokens.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pace_agent.errors import UserError

MARK = "\ue000"
"""Opens every stand-in: a private-use character, which no template writes. One that a content holds is hidden too."""
_LITERAL_MARK = MARK + "\U000ffffd"
_STAND_IN_BASE = 0xF0000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_CACHED_CHARACTERS = 2000


class TextEncoder:
    """Encodes rendered text for one fast tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        added: list[dict[str, Any]] = [token for token in spec["added_tokens"] if token["content"]]
        self._id_of = {token["content"]: int(token["id"]) for token in added}
        control = [text for text in self._id_of if not text.isspace()]
        self.control_ids = frozenset(self._id_of[text] for text in control)
        self.plain_borders = len(control) == len(added) and not any(
            token[flag] for token in added for flag in ("lstrip", "rstrip", "single_word", "normalized")
        )
        """No added token takes anything from the text beside it, so text can be put between tokens as it is."""
        firsts = sorted({text[0] for text in control})
        self._stand_in = {first: MARK + chr(_STAND_IN_BASE + i) for i, first in enumerate(firsts)} | {
            MARK: _LITERAL_MARK
        }
        self._original = {stand_in: first for first, stand_in in self._stand_in.items()}
        self._hidden = _first_characters(control)
        self._restored = re.compile(f"{MARK}.")
        self._genuine = _added_tokens(added)
        _forget_added_tokens(spec, control)
        self._inner, self._first = _backends(spec)
        self._cached = lru_cache(maxsize=4096)(self._encode)

    def hide(self, text: str) -> str:
        """The same text with a stand-in in every control token, so that no template text can be taken for it."""
        return self._hidden.sub(lambda match: self._stand_in[match[0]], text)

    def hide_all(self, value: Any) -> Any:
        """`hide` on every string in plain data, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide_all(key): self.hide_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(item) for item in value]
        return value

    def split(self, rendered: str) -> list[str | int]:
        """Genuine added tokens as ids, and the texts between them with stand-ins still in. No text is empty."""
        pieces: list[str | int] = []
        for i, piece in enumerate(self._genuine.split(rendered)):
            if i % 2:
                known = self._id_of.get(piece)
                pieces.append(self._id_of[piece.strip()] if known is None else known)
            elif piece:
                pieces.append(piece)
        return pieces

    def ids(self, rendered: str, *, first: bool = False) -> list[int]:
        """Ids of rendered text. `first`: the text opens the sequence, which some tokenizers mark with a space."""
        out: list[int] = []
        for piece in self.split(rendered):
            if isinstance(piece, int):
                out.append(piece)
            else:
                text = self._restored.sub(lambda match: self._original.get(match[0], match[0]), piece)
                out.extend(self.plain(text, first=first and not out))
        return out

    def plain(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Ids of text in which nothing is a control token. Half a surrogate pair becomes U+FFFD."""
        return self._cached(text, first) if len(text) <= _CACHED_CHARACTERS else self._encode(text, first)

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        backend = self._first if first else self._inner
        try:
            return tuple(backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):
            return tuple(backend.encode(_LONE_SURROGATE.sub("\ufffd", text), add_special_tokens=False).ids)

    def check(self, rendered: str) -> None:
        """Raise UserError unless `rendered` gets the tokenizer's own ids, and control tokens as text get others."""
        ours, theirs = self.ids(rendered, first=True), self._tokenizer.encode(rendered, add_special_tokens=False)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            near = self._tokenizer.decode(theirs[max(0, at - 4) : at + 4])
            raise UserError(
                f"This tokenizer ({_name(self._tokenizer)}) encodes text differently between special tokens than alone "
                f"(first at token {at}, near {near!r}), so turns can't be appended exactly. Use a tokenizer whose "
                "added tokens are not normalized and that prepends no space after a special token."
            )
        for text, token in self._id_of.items():
            if token in self.control_ids and token in self.plain(text) and text != self._tokenizer.unk_token:
                raise UserError(
                    f"This tokenizer ({_name(self._tokenizer)}) can't write {text!r} as ordinary text, so tool output "
                    "could forge it. Use a tokenizer that holds it only as an added token."
                )


def _name(tokenizer: Any) -> str:
    return str(tokenizer.name_or_path or type(tokenizer).__name__)


def _first_characters(control: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of every occurrence of a control token, overlapping ones too, and every MARK."""
    rests: dict[str, list[str]] = defaultdict(list)
    for text in control:
        rests[text[0]].append(re.escape(text[1:]))
    branches = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items() if first != MARK]
    return re.compile("|".join([MARK, *branches]))


def _added_tokens(added: list[dict[str, Any]]) -> re.Pattern[str]:
    """One group that matches an added token, the longest first, with the whitespace that its flags give it."""
    branches = []
    for token in sorted(added, key=lambda token: len(token["content"]), reverse=True):
        pattern = re.escape(token["content"])
        if token["single_word"]:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        branches.append((r"\s*" if token["lstrip"] else "") + pattern + (r"\s*" if token["rstrip"] else ""))
    return re.compile(f"({'|'.join(branches)})" if branches else "((?!))")


def _forget_added_tokens(spec: dict[str, Any], control: Iterable[str]) -> None:
    """Change a tokenizer's JSON so that no text encodes to a control token.

    Taking them off the list of added tokens is not enough: a model's own vocabulary may hold them, and its merges
    may build them. The unknown token stays, since any text may need it.
    """
    spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    model = spec["model"]
    gone = set(control) - {model.get("unk_token")}
    if isinstance(model["vocab"], dict):
        merged = [
            tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges", ())
        ]
        if merged:
            model["merges"] = [list(pair) for pair in merged if gone.isdisjoint((*pair, pair[0] + pair[1]))]
        model["vocab"] = {text: token for text, token in model["vocab"].items() if text not in gone}
    else:  # Unigram: a list whose places are the ids
        model["vocab"] = [
            [f"{MARK}{i}", -1e9] if piece in gone else [piece, score] for i, (piece, score) in enumerate(model["vocab"])
        ]


def _backends(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Tokenizers for text inside a sequence and for text that opens it: they differ where only the first word gets a
    space prepended."""
    from tokenizers import Tokenizer

    first = Tokenizer.from_str(json.dumps(spec))
    if not _never_prepend(spec["pre_tokenizer"]):
        return first, first
    return Tokenizer.from_str(json.dumps(spec)), first


def _never_prepend(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Turn `prepend_scheme: first` into `never`; whether there was one."""
    if pre_tokenizer is None:
        return False
    changed = False
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
        changed = True
    for part in pre_tokenizer.get("pretokenizers", ()):
        changed = _never_prepend(part) or changed
    return changed
