"""Ways to get kept weights into servers that are paused.

What always holds:

* A send says of every server whether it took the weights: None, or the error with the server's own words. What goes
  wrong at one server stays that server's, and no step takes longer than the transport's limit.
* Version and flush come with the last tensors, so a server that took them has stamped and forgotten what it should.
* After an error the server's weights may be of two versions, whatever version it reports: send again before it serves.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from pace_agent.engine.sglang.client import Refused, ServerClient
from pace_agent.engine.sglang.weights.kept import KeptWeights
from pace_agent.errors import EngineError

STEP_SECONDS = 300.0
CLOSING_SECONDS = 10.0
BUCKET_BYTES = 512 << 20
Outcome = dict[str, EngineError | None]
"""By the server's URL: None where it took the weights."""


class Transport(Protocol):
    async def send(self, servers: Sequence[ServerClient], weights: KeptWeights, version: int) -> Outcome:
        """Put `weights` into all servers at once, as `version`. Each must be paused with `retract`."""

    async def aclose(self) -> None: ...


def make_transport(
    update: Literal["disk", "tensor", "group"], device: str = "cpu", *, step_seconds: float = STEP_SECONDS
) -> Transport:
    """The transport that the configuration calls `update`. A group sends its tensors from `device`."""
    if update == "disk":
        return DiskTransport(step_seconds=step_seconds)
    if update == "tensor":
        from pace_agent.engine.sglang.weights.tensor_transport import TensorTransport

        return TensorTransport(step_seconds=step_seconds)
    from pace_agent.engine.sglang.weights.group_transport import GroupTransport

    return GroupTransport(device, step_seconds=step_seconds)


class DiskTransport:
    """Servers load the folder themselves; each must see it under the same path."""

    def __init__(self, *, step_seconds: float = STEP_SECONDS) -> None:
        self._step_seconds = step_seconds

    async def send(self, servers: Sequence[ServerClient], weights: KeptWeights, version: int) -> Outcome:
        body = {
            "model_path": str(weights.folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        steps = Steps(servers, self._step_seconds)
        await steps.post("/update_weights_from_disk", body)
        return steps.outcome

    async def aclose(self) -> None:
        """Nothing is held."""


class Steps:
    """One send, step by step: each step at once on every server that has not failed. `outcome` says who has."""

    def __init__(self, servers: Sequence[ServerClient], seconds: float) -> None:
        self._servers = servers
        self._seconds = seconds
        self.outcome: Outcome = dict.fromkeys(server.url for server in servers)

    @property
    def going(self) -> list[ServerClient]:
        return [server for server in self._servers if self.outcome[server.url] is None]

    def failed(self, kind: type[EngineError] = EngineError) -> list[ServerClient]:
        return [server for server in self._servers if isinstance(self.outcome[server.url], kind)]

    async def run(self, step: Callable[[ServerClient], Awaitable[None]]) -> None:
        async def bounded(server: ServerClient) -> None:
            try:
                # What waits inside has the same limit and better words; this one is for what has none.
                async with asyncio.timeout(self._seconds + CLOSING_SECONDS):
                    await step(server)
            except EngineError as error:
                self.outcome[server.url] = error
            except TimeoutError:
                self.outcome[server.url] = EngineError(f"{server.url}: new weights took over {self._seconds:g} s")
            except Exception as error:
                self.outcome[server.url] = EngineError(f"{server.url}: {type(error).__name__}: {error}")

        await asyncio.gather(*map(bounded, self.going))

    async def post(self, path: str, body: dict[str, Any]) -> None:
        await self.run(lambda server: post(server, path, body, self._seconds))

    async def begin(self) -> None:
        """Open a weight update on each server."""
        await self.run(lambda server: _begin(server, self._seconds))

    async def end(self) -> None:
        """Close the weight update on each server, also on those that refused. A later begin does for others."""
        await asyncio.gather(self.post("/end_weight_update", {}), *map(_end_quietly, self.failed(Refused)))


async def post(server: ServerClient, path: str, body: dict[str, Any], seconds: float) -> None:
    """A control call whose answer says `success`. Refused when it does not succeed, Unreachable without an answer."""
    answer = await server.post(path, body, timeout=seconds)
    if answer.get("success") is False:
        raise Refused(f"{server.url}{path}: {answer.get('message', 'no message')}", 200)


async def _begin(server: ServerClient, seconds: float) -> None:
    try:
        await post(server, "/begin_weight_update", {}, seconds)
    except Refused as error:
        if "already open" not in str(error):
            raise
        # Left by a process that was killed in the middle. Its weights are about to be overwritten.
        await post(server, "/end_weight_update", {}, seconds)
        await post(server, "/begin_weight_update", {}, seconds)


async def _end_quietly(server: ServerClient) -> None:
    with suppress(EngineError):  # its failure is known
        await server.post("/end_weight_update", {}, timeout=CLOSING_SECONDS)


async def tensor_parallel(server: ServerClient, seconds: float) -> int:
    """How many ranks the server splits its model over. EngineError where it is data parallel: that takes no tensors."""
    info = await server.get("/server_info", timeout=seconds)
    if int(info.get("dp_size", 1)) != 1:
        raise EngineError(f"{server.url} runs with --dp-size {info['dp_size']}; SGLang takes tensors only with 1")
    return int(info.get("tp_size", 1))
