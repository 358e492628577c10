"""Which servers may serve.

    serving    answers, with the published weights
    fenced     answers, but a weight update failed there, or its weights are not the published ones
    lost       does not answer, or produced no token for too long

What always holds: only a serving server gets requests, and it becomes one again only after it reported the published
version.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pace_agent.engine.sglang.client import ServerClient

if TYPE_CHECKING:
    from pace_agent.engine.sglang.turn import Attempt

log = logging.getLogger(__name__)
FIRST_RETRY, LAST_RETRY = 1.0, 60.0


class Health(StrEnum):
    SERVING = "serving"
    FENCED = "fenced"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Server:
    """A server, what runs on it, and how it is."""

    client: ServerClient
    health: Health = Health.SERVING
    reason: str = ""
    attempts: "set[Attempt]" = field(default_factory=set)
    sessions: int = 0
    heard_at: float = 0.0
    """When a token came last, or when it had a reason not to come."""
    torn: bool = False
    """An update failed half-way: whatever version it reports, its weights may be of two."""
    left_at: float = 0.0
    """When it stopped serving."""
    retry_at: float = 0.0
    retry_after: float = 0.0
    on_leave: Callable[["Server"], None] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def serving(self) -> bool:
        return self.health is Health.SERVING

    def leave(self, health: Health, reason: str) -> None:
        """Take the server out; what runs on it is cut, and goes on elsewhere."""
        was, self.health, self.reason = self.health, health, reason
        if was is Health.SERVING:
            self.left_at = time.monotonic()
            log.warning("%s is out: %s", self.url, reason)
            if self.on_leave is not None:
                self.on_leave(self)
        for attempt in list(self.attempts):
            attempt.cut()

    def rest(self) -> None:
        """There was a reason for no token to come; now they may."""
        self.heard_at = time.monotonic()
        for attempt in self.attempts:
            attempt.heard_at = self.heard_at

    def put_off(self, reason: str) -> None:
        """It is not ready to come back: look later and later."""
        if self.health is Health.FENCED and reason != self.reason:
            log.warning("%s stays out: %s", self.url, reason)
        self.reason = reason
        self.retry_after = min(max(2 * self.retry_after, FIRST_RETRY), LAST_RETRY)
        self.retry_at = time.monotonic() + self.retry_after

    def come_back(self, version: int) -> None:
        self.health, self.reason, self.torn = Health.SERVING, "", False
        self.retry_after, self.retry_at = 0.0, 0.0
        self.heard_at = time.monotonic()
        log.warning("%s serves again, with version %d", self.url, version)


class Routing:
    """Keeps the turns of one rollout on one server, where its prefix is cached, and the servers evenly loaded."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = list(servers)
        self._of: dict[str, Server] = {}

    def route(self, session: str) -> Server | None:
        """The server for the next turn of `session`; None while no server serves."""
        known = self._of.get(session)
        if known is not None and known.serving:
            return known
        serving = [server for server in self._servers if server.serving]
        if not serving:
            return None
        chosen = min(serving, key=lambda server: (server.sessions, len(server.attempts)))
        if session:
            self.release(session)
            self._of[session] = chosen
            chosen.sessions += 1
        return chosen

    def release(self, session: str) -> None:
        known = self._of.pop(session, None)
        if known is not None:
            known.sessions -= 1
