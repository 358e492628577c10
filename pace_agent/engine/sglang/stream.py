"""What one `/generate` stream says: ids, log-probabilities, versions, and how it ended.

SGLang repeats everything in each chunk unless it was started with `--incremental-streaming-output`; which of the two a
server does shows in its second chunk. Chunks that repeat everything are parsed only when they are asked for, since the
next one replaces them.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from pace_agent.errors import EngineError
from pace_agent.types import VersionSpan

End = Literal["stop", "length", "abort", "error", "cut"]


class WrongVersion(EngineError):
    """A server sampled with other weights than it was known to have."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream, to which its tokens can be cut back."""

    parsed: int
    latest: bytes | None
    meta: dict[str, Any]


class Stream:
    """Fed with bytes as they come. `ids` and `logprobs` grow; `end` is `cut` until a chunk says otherwise."""

    def __init__(self) -> None:
        self.end: End = "cut"
        self.message = ""
        self.status: int | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._meta: dict[str, Any] = {}
        self._rest = b""
        self._latest: bytes | None = None
        self._cumulative: bool | None = None

    def feed(self, data: bytes) -> None:
        """Take the events that `data` completes."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                self._event(event[6:])

    @property
    def ids(self) -> list[int]:
        self.settle()
        return self._ids

    @property
    def logprobs(self) -> list[float]:
        self.settle()
        return self._logprobs

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them came from the server's cache; zeros where it did not say."""
        return int(self._meta.get("prompt_tokens") or 0), int(self._meta.get("cached_tokens") or 0)

    @property
    def version(self) -> str | None:
        """The version that the server reported beside the last tokens, which is no stamp: it may be a later one."""
        self.settle()
        return None if self._meta.get("weight_version") is None else str(self._meta["weight_version"])

    def mark(self) -> Mark:
        """The place that the stream has reached."""
        return Mark(len(self._ids), self._latest, self._meta)

    def cut_back(self, mark: Mark) -> None:
        """Forget every token after `mark`."""
        if mark.latest is not None:
            self._latest = None
            self._take(json.loads(mark.latest))
            return
        self.settle()
        self._meta = mark.meta
        del self._ids[mark.parsed :], self._logprobs[mark.parsed :]

    def spans(self, url: str) -> tuple[VersionSpan, ...]:
        """The versions of all tokens, from a final chunk. EngineError where it does not tell them.

        WrongVersion where one is not a number, and so not of this run.
        """
        stamps, count = self._meta.get("weight_versions"), len(self.ids)
        if stamps is None:
            raise EngineError(
                f"{url} ended a turn of {count} tokens without weight_versions: its SGLang is too old to stamp "
                "tokens; 0.5.23 does"
            )
        spans = [VersionSpan(_version(stamp["version"], url), stamp["start"], stamp["end"]) for stamp in stamps]
        spans = [span for span in spans if span.end > span.start]
        ends = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != ends[:-1] or ends[-1] != count:
            raise EngineError(f"{url} stamped {stamps} on a turn of {count} tokens: the spans don't cover it")
        return tuple(spans)

    @property
    def stamped(self) -> int:
        """How many tokens the final chunk stamps; an abort of a turn that waited stamps none of those it had."""
        self.settle()
        return max((stamp["end"] for stamp in self._meta.get("weight_versions") or ()), default=0)

    def _event(self, payload: bytes) -> None:
        if payload.startswith(b'{"error"'):
            self.settle()
            self._error(json.loads(payload)["error"])
        elif self._cumulative:
            self._latest = payload
        else:
            self._take(json.loads(payload))

    def settle(self) -> None:
        """Parse what was put off, so that `end` is known."""
        if self._latest is not None:
            payload, self._latest = self._latest, None
            self._take(json.loads(payload))

    def _take(self, chunk: dict[str, Any]) -> None:
        ids, meta = chunk.get("output_ids") or [], chunk["meta_info"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        total = meta.get("completion_tokens")
        if self._cumulative is None and self._ids:
            self._cumulative = len(ids) == total
        if self._cumulative is False:
            # The abort of a turn that waited repeats an id beside all its log-probabilities: that is nothing new.
            if len(logprobs) == len(ids):
                self._ids += ids
                self._logprobs += logprobs
        elif ids or not self._ids:
            self._ids, self._logprobs = list(ids), logprobs[: len(ids)]
        if len(self._logprobs) != len(self._ids):
            raise EngineError(f"{len(self._ids)} tokens came with {len(self._logprobs)} log-probabilities")
        self._meta = meta
        reason = meta.get("finish_reason")
        if reason is not None:
            self.end = reason["type"]
            self.message = str(reason.get("message") or "")
            self.status = reason.get("status_code")

    def _error(self, error: Any) -> None:
        self.end = "error"
        self.message = str(error.get("message") if isinstance(error, dict) else error)
        code = error.get("code") if isinstance(error, dict) else None
        self.status = code if isinstance(code, int) else None


def _version(text: str, url: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WrongVersion(f"{url} sampled with version {text!r}, which is not of this run") from None
