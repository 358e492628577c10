"""A router in front of the servers, as the fleet sees it.

What always holds: the router is told of a server before that serves, and to drop one that is out before generation
goes on after a pause. Until it has done so, what it sends there waits, since that server stays paused, and is cut in
the end; tokens of other weights would show by their version.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from pace_agent.engine.sglang.client import Keys, ServerClient
from pace_agent.engine.sglang.servers import Server
from pace_agent.engine.sglang.serving.router import Router
from pace_agent.errors import EngineError

log = logging.getLogger(__name__)


class Front:
    """`server` stands for the router: every turn runs on it, and which of the servers behind it does is not known."""

    def __init__(self, router: Router, keys: Keys | None) -> None:
        self.server = Server(ServerClient(router.url, keys))
        self._router = router
        self._dropping: set[asyncio.Task[None]] = set()

    async def start(self, servers: Sequence[Server]) -> None:
        """Tell the router of all servers. EngineError where it does not take one."""
        for server in servers:
            server.on_leave = self._drop
        await asyncio.gather(*(self.add(server) for server in servers))

    async def add(self, server: Server) -> None:
        await self.settle()
        await self._router.add(server.url)

    def _drop(self, server: Server) -> None:
        task = asyncio.create_task(self._remove(server.url))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _remove(self, url: str) -> None:
        try:
            await self._router.remove(url)
        except EngineError as error:
            log.warning("the router still has %s: %s", url, error)

    async def settle(self) -> None:
        """Wait until the router has dropped whom it should."""
        await asyncio.gather(*self._dropping)

    async def answers(self) -> bool:
        try:
            await self._router.workers()
        except EngineError:
            return False
        return True

    async def takes(self, servers: Iterable[Server]) -> bool:
        """Tell a router that came back of these servers; whether it has them."""
        try:
            await asyncio.gather(*(self._router.add(server.url) for server in servers))
        except EngineError:
            return False
        return True

    def cut_stalled(self, seconds: float) -> None:
        """End the attempts that heard nothing for so long; their turns go on in others."""
        now = time.monotonic()
        for attempt in list(self.server.attempts):
            if now - attempt.heard_at > seconds:
                attempt.cut()

    async def aclose(self) -> None:
        for task in list(self._dropping):
            task.cancel()
        await asyncio.gather(*self._dropping, return_exceptions=True)
        await self.server.client.aclose()
