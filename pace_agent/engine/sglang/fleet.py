"""The servers of one engine: pausing them, giving them weights, looking after them.

What always holds:

* Weights and version change together, on all serving servers or on none of them. One that refuses is fenced.
* A server that was out serves again only with the published version; the last published weights are kept for it.
* Pauses, updates and returns come one after another, never two at once; what may take long, finding out whether a
  server that is out would work, holds up none of them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pace_agent.engine.base import UpdateRefused, WeightSource
from pace_agent.engine.sglang.client import NoAnswer, Unreachable
from pace_agent.engine.sglang.front import Front
from pace_agent.engine.sglang.probe import Facts, all_of, check_server, generates, reported_version
from pace_agent.engine.sglang.servers import Health, Routing, Server
from pace_agent.engine.sglang.weights.kept import KeptWeights, WeightKeeper
from pace_agent.engine.sglang.weights.transports import Transport
from pace_agent.errors import EngineError, RunError

log = logging.getLogger(__name__)
PROBE_SECONDS = 1.0
CONTROL_SECONDS = 120.0
ANSWER_SECONDS = 30.0
RETRACT = {"mode": "retract"}
"""The pause after which spans are exact: what runs is computed anew under the new weights."""


class Fleet:
    """`model` is the folder of what the servers have at the start, under the name `version`.

    `notify` is called when turns that wait should look again.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        transport: Transport,
        keeper: WeightKeeper,
        model: Path,
        version: int,
        stall_seconds: float,
        wait_seconds: float,
        notify: Callable[[], None],
        front: Front | None = None,
    ) -> None:
        self.servers = list(servers)
        self._front = front
        self.version = version
        self.paused = False
        self._transport = transport
        self._keeper = keeper
        self._model = model
        self._kept: KeptWeights | None = None
        self._stall_seconds = stall_seconds
        self._wait_seconds = wait_seconds
        self._notify = notify
        self._routing = Routing(self.servers)
        self._control = asyncio.Lock()
        self._watchers: list[asyncio.Task[None]] = []
        self._out_seconds = 0.0
        self._waiting = False
        self._asleep = False
        self._gone = ""

    @property
    def out_seconds(self) -> float:
        """How long no server served."""
        since = self._out_since()
        return self._out_seconds + (0.0 if since is None else time.monotonic() - since)

    def _out_since(self) -> float | None:
        """When the last one left, or the router; None while turns can go somewhere."""
        if not self.serving():
            return max(server.left_at for server in self.servers)
        return None if self._front is None or self._front.server.serving else self._front.server.left_at

    def check_hope(self) -> None:
        """RunError once no server came back in time: the run can't go on."""
        if self._gone:
            raise RunError(self._gone)

    async def start(self) -> list[Facts]:
        """Check every server, then look after them."""
        facts = await all_of(check_server(server.client, self.version, self._model) for server in self.servers)
        looks: list[Callable[[], Awaitable[None]]] = [partial(self._look, server) for server in self.servers]
        if self._front is not None:
            await self._front.start(self.servers)
            looks.append(partial(self._look_at_front, self._front))
        self._watchers = [asyncio.create_task(_repeat(look), name="sglang-watch") for look in [*looks, self._mind_gap]]
        return facts

    async def aclose(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._front is not None:
            await self._front.aclose()
        await self._transport.aclose()
        await asyncio.gather(*(server.client.aclose() for server in self.servers))
        await asyncio.to_thread(self._keeper.close)

    def route(self, session: str) -> Server | None:
        """Where the next turn of a session goes; None while paused, and while no server serves."""
        if self.paused:
            return None
        if self._front is not None:
            return self._front.server if self._front.server.serving and self.serving() else None
        return self._routing.route(session)

    def behind(self, server: Server) -> list[Server]:
        """The servers that an attempt on `server` may run on: itself, or all that serve behind a router."""
        return [server] if server in self.servers else self.serving()

    def release(self, session: str) -> None:
        self._routing.release(session)

    # ---- weights --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self.paused = True
        async with self._control:
            await self._tell_all("/pause_generation", RETRACT)

    async def resume(self) -> None:
        async with self._control:
            if await self._wake():
                await self._send(self.serving(), await self._published(), self.version)
            if self._front is not None:
                await self._front.settle()
            await self._tell_all("/continue_generation", {})
            self.paused = False
            for server in [*self.servers, *([] if self._front is None else [self._front.server])]:
                server.rest()
        self._notify()

    async def release_memory(self) -> None:
        """Let paused servers without turns give up their memory."""
        async with self._control:
            self._asleep = True
            await self._tell_all("/release_memory_occupation", {})

    async def _wake(self) -> bool:
        """Give servers their memory back; whether they had given it up. Then they want weights."""
        was, self._asleep = self._asleep, False
        if was:
            await self._tell_all("/resume_memory_occupation", {})
        return was

    async def update(self, source: WeightSource, version: int) -> None:
        """Publish to all serving servers; those that are out get these weights when they return.

        UpdateRefused where some refused: they are fenced, the others have the old weights and version. EngineError
        where all did, or the weights are not the model's.
        """
        kept = await asyncio.to_thread(self._keeper.keep, source, version)
        async with self._control:
            await self._wake()
            refused = await self._send(self.serving(), kept, version)
            if refused:
                kept.delete()
                await self._roll_back()
                raise self._refusal(refused, version)
            before, self._kept, self.version = self._kept, kept, version
        if before is not None:
            before.delete()

    async def _published(self) -> KeptWeights:
        """The weights that every serving server has."""
        if self._kept is None:
            self._kept = await asyncio.to_thread(self._keeper.keep, self._model, self.version)
        return self._kept

    async def _roll_back(self) -> None:
        """Take new weights back from those that took them; one that does not give them up is out."""
        servers = self.serving()
        try:
            weights = await self._published() if servers else None
        except EngineError as error:
            for server in servers:
                server.torn = True
                server.leave(Health.FENCED, f"its new weights could not be taken back: {error}")
        else:
            if weights is not None:
                await self._send(servers, weights, self.version)

    async def _send(self, servers: Sequence[Server], weights: KeptWeights, version: int) -> dict[str, str]:
        """Weights to servers. Takes those out that failed; what the ones that refused said, by URL."""
        try:
            outcome = await self._transport.send([server.client for server in servers], weights, version)
        except BaseException:
            for server in servers:
                server.torn = True
                server.leave(Health.FENCED, f"the update to version {version} was broken off")
            raise
        refused = {}
        for server in servers:
            error = outcome[server.url]
            server.torn = error is not None
            if isinstance(error, Unreachable):
                server.leave(Health.LOST, str(error))
            elif error is not None:
                server.leave(Health.FENCED, str(error))
                refused[server.url] = str(error)
        return refused

    def _refusal(self, refused: Mapping[str, str], version: int) -> EngineError:
        said, left = "; ".join(refused.values()), len(self.serving())
        if not left:
            said = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
            return EngineError(f"no server is left after the update to version {version}: {said}")
        return UpdateRefused(
            f"{len(refused)} of {len(self.servers)} servers refused the weights of version {version} and are out now; "
            f"{left} serve version {self.version} again. {said}"
        )

    async def _tell_all(self, path: str, body: Mapping[str, str]) -> None:
        """A control call to every serving server; one that does not follow is out."""

        async def tell(server: Server) -> None:
            try:
                await server.client.post(path, body, timeout=CONTROL_SECONDS)
            except EngineError as error:
                server.leave(Health.LOST if isinstance(error, Unreachable) else Health.FENCED, str(error))

        await asyncio.gather(*(tell(server) for server in self.serving()))

    def serving(self) -> list[Server]:
        return [server for server in self.servers if server.serving]

    # ---- servers that come and go ---------------------------------------------------------------------------------

    async def _look(self, server: Server) -> None:
        """Is a serving server well? Is one that is out ready to come back?"""
        if server.serving:
            await self._check(server)
        elif not self.paused and time.monotonic() >= server.retry_at:
            try:
                await self._bring_back(server)
            except EngineError as error:
                server.put_off(str(error))

    async def suspect(self, server: Server, wrong: str = "") -> None:
        """Something went wrong with an attempt there: see who is still well. `wrong` is what is known of it."""
        if server in self.servers and wrong:
            server.leave(Health.FENCED, wrong)
        elif self._front is not None:
            await self._look_at_front(self._front)
        await asyncio.gather(*(self._check(each) for each in self.behind(server) if each.serving))

    async def _look_at_front(self, front: Front) -> None:
        """Is the router there? Did turns behind it stall?"""
        if await front.answers():
            if not front.server.serving and await front.takes(self.serving()):
                self._out_seconds = self.out_seconds
                front.server.come_back(self.version)
                self._notify()
        elif front.server.serving:
            front.server.leave(Health.LOST, "the router does not answer")
        if not self.paused:
            front.cut_stalled(self._stall_seconds)

    async def _check(self, server: Server) -> None:
        """Take a serving server out that is not there, does not work, or has other weights than the published ones."""
        quiet = time.monotonic() - server.heard_at
        if server.attempts and not self.paused and quiet > self._stall_seconds:
            server.leave(Health.LOST, f"it has {len(server.attempts)} turns to do, and for {quiet:.0f} s came no token")
            return
        expected = self.version
        try:
            version = await reported_version(server.client, ANSWER_SECONDS)
        except NoAnswer:
            return  # busy or dead: its tokens will tell
        except EngineError as error:
            server.leave(Health.LOST, str(error))
            return
        changing = self._control.locked() or expected != self.version
        if version != str(expected) and not changing:
            server.leave(
                Health.FENCED,
                f"it reports version {version}, but {expected} is published: it was restarted, or another program "
                "updates its weights",
            )

    async def _bring_back(self, server: Server) -> None:
        """Let a server serve again, with the published weights. EngineError where it is not ready.

        Not during a pause: an update that it refused is tried again without it.
        """
        client = server.client
        await client.post("/continue_generation", {}, timeout=ANSWER_SECONDS)
        await generates(client, ANSWER_SECONDS)
        async with self._control:
            if self.paused:
                return
            reported = await reported_version(client, ANSWER_SECONDS)
            if server.torn or server.health is Health.FENCED or reported != str(self.version):
                await client.post("/pause_generation", RETRACT, timeout=CONTROL_SECONDS)
                await self._send([server], await self._published(), self.version)
                if server.torn:
                    raise EngineError(server.reason)
                await client.post("/continue_generation", {}, timeout=CONTROL_SECONDS)
                reported = await reported_version(client, ANSWER_SECONDS)
                if reported != str(self.version):
                    raise EngineError(f"it reports version {reported} after it was given {self.version}")
            if self._front is not None:
                await self._front.add(server)
            self._out_seconds = self.out_seconds
            server.come_back(self.version)
        self._notify()

    async def _mind_gap(self) -> None:
        """Say that nobody serves, and give up in the end."""
        since, wait = self._out_since(), self._wait_seconds
        if since is not None and not self._waiting:
            log.warning("no SGLang server is left: rollouts wait for one, up to %g s", wait)
        self._waiting = since is not None
        if since is not None and time.monotonic() - since > wait and not self._gone:
            reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
            self._gone = f"no SGLang server came back within {wait:g} s. {reasons}"
            self._notify()


async def _repeat(look: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(PROBE_SECONDS)
        try:
            await look()
        except Exception:  # whatever it is, servers must be looked after
            log.exception("looking after the servers failed")
