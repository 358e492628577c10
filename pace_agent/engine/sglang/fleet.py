"""The servers of one engine: pausing them, giving them weights, looking after them.

What always holds:

* Weights and version change together, on all serving servers or on none of them. One that refuses is fenced.
* A server that was out serves again only with the published version; the last published weights are kept for it.
* Control calls come one after another, never two at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pace_agent.engine.base import UpdateRefused, WeightSource
from pace_agent.engine.sglang.client import NoAnswer, Unreachable
from pace_agent.engine.sglang.probe import Facts, check_server, generates, reported_version
from pace_agent.engine.sglang.servers import Health, Routing, Server
from pace_agent.engine.sglang.transports import Transport
from pace_agent.engine.sglang.weights import KeptWeights, WeightKeeper
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
    ) -> None:
        self.servers = list(servers)
        self.version = version
        self.paused = False
        self.gone: RunError | None = None
        """Set when no server came back in time: the run can't go on."""
        self._transport = transport
        self._keeper = keeper
        self._model = model
        self._kept: KeptWeights | None = None
        self._stall_seconds = stall_seconds
        self._wait_seconds = wait_seconds
        self._notify = notify
        self._routing = Routing(self.servers)
        self._control = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._out_since: float | None = None
        self._out_seconds = 0.0

    @property
    def out_seconds(self) -> float:
        """How long no server served."""
        return self._out_seconds + (0.0 if self._out_since is None else time.monotonic() - self._out_since)

    async def start(self, architecture: str | None) -> list[Facts]:
        """Check every server, then look after them."""
        facts = await asyncio.gather(
            *(check_server(server.client, self.version, architecture) for server in self.servers)
        )
        self._watcher = asyncio.create_task(self._watch(), name="sglang-watch")
        return list(facts)

    async def aclose(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._transport.aclose()
        await asyncio.gather(*(server.client.aclose() for server in self.servers))
        await asyncio.to_thread(self._keeper.close)

    def route(self, session: str) -> Server | None:
        """Where the next turn of a session goes; None while paused, and while no server serves."""
        return None if self.paused else self._routing.route(session)

    def release(self, session: str) -> None:
        self._routing.release(session)

    # ---- weights --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self.paused = True
        async with self._control:
            await self._tell_all("/pause_generation", RETRACT)

    async def resume(self) -> None:
        async with self._control:
            await self._tell_all("/continue_generation", {})
            self.paused = False
            for server in self.servers:
                server.heard_at = time.monotonic()
        self._notify()

    async def update(self, source: WeightSource, version: int) -> None:
        """Publish to all serving servers; those that are out get these weights when they return.

        UpdateRefused where some refused: they are fenced, the others have the old weights and version. EngineError
        where all did, or the weights are not the model's.
        """
        kept = await asyncio.to_thread(self._keeper.keep, source, version)
        async with self._control:
            refused = await self._send(self.serving(), kept, version)
            if refused:
                kept.delete()
                if self.serving():
                    await self._send(self.serving(), await self._published(), self.version)
                raise self._refusal(refused, version)
            before, self._kept, self.version = self._kept, kept, version
        if before is not None:
            before.delete()

    async def _published(self) -> KeptWeights:
        """The weights that every serving server has."""
        if self._kept is None:
            self._kept = await asyncio.to_thread(self._keeper.keep, self._model, self.version)
        return self._kept

    async def _send(self, servers: Sequence[Server], weights: KeptWeights, version: int) -> dict[str, str]:
        """Weights to servers. Takes those out that failed; what the ones that refused said, by URL."""
        outcome = await self._transport.send([server.client for server in servers], weights, version)
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
            return EngineError(f"no server took the weights of version {version}: {said}")
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

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await asyncio.gather(*(self.look(server) for server in self.servers))
                self._mind_the_gap()
            except Exception:  # whatever it is, servers must be looked after
                log.exception("looking after the servers failed")

    async def look(self, server: Server) -> None:
        """Is a serving server well? Is one that is out ready to come back?"""
        if server.serving:
            await self._check(server)
        elif time.monotonic() >= server.retry_at:
            async with self._control:
                if not server.serving:
                    await self._bring_back(server)

    async def _check(self, server: Server) -> None:
        quiet = time.monotonic() - server.heard_at
        if server.attempts and not self.paused and quiet > self._stall_seconds:
            server.leave(Health.LOST, f"it has {len(server.attempts)} turns to do, and for {quiet:.0f} s came no token")
            return
        if self._control.locked():
            return  # its version may be changing
        expected = self.version
        try:
            version = await reported_version(server.client, ANSWER_SECONDS)
        except NoAnswer:
            return  # busy or dead: its tokens will tell
        except EngineError as error:
            server.leave(Health.LOST, str(error))
            return
        if version != str(expected) and expected == self.version and not self._control.locked():
            server.leave(
                Health.FENCED,
                f"it reports version {version}, but {expected} is published: it was restarted, or another program "
                "updates its weights",
            )

    async def _bring_back(self, server: Server) -> None:
        """Give a server the published weights, unless it has them and only was away; then let it serve."""
        client = server.client
        try:
            reported = await reported_version(client, ANSWER_SECONDS)
            if server.torn or server.health is Health.FENCED or reported != str(self.version):
                await client.post("/pause_generation", RETRACT, timeout=CONTROL_SECONDS)
                outcome = await self._transport.send([client], await self._published(), self.version)
                if (error := outcome[client.url]) is not None:
                    raise error
            await client.post("/continue_generation", {}, timeout=CONTROL_SECONDS)
            await generates(client, ANSWER_SECONDS)
            if self.paused:
                await client.post("/pause_generation", RETRACT, timeout=CONTROL_SECONDS)
            reported = await reported_version(client, ANSWER_SECONDS)
            if reported != str(self.version):
                raise EngineError(f"{client.url} reports version {reported} after it was given {self.version}")
        except EngineError as error:
            server.put_off(str(error))
            return
        server.come_back(self.version)
        self._notify()

    def _mind_the_gap(self) -> None:
        """Say that nobody serves, count how long, and give up in the end."""
        now, wait = time.monotonic(), self._wait_seconds
        if self.serving():
            if self._out_since is not None:
                self._out_seconds += now - self._out_since
                self._out_since = None
        elif self._out_since is None:
            self._out_since = now
            log.warning("no SGLang server is left: rollouts wait for one, up to %g s", wait)
        elif now - self._out_since > wait and self.gone is None:
            reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
            self.gone = RunError(f"no SGLang server came back within {wait:g} s. {reasons}")
            self._notify()
