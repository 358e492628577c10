"""New weights through torch.distributed, from rank 0 here to the ranks of a server.

What always holds:

* Each server has a group of its own, this process and its tensor parallel ranks, so that a server that dies or hangs
  takes no other with it. The groups are nobody else's: not the default group, nor in any list of torch's.
* Nothing waits for a peer in the event loop, nor in a thread that could hold up the end of the process.
* A group that failed is never used again. One that a restarted server no longer knows is made anew, once per send.
"""

import asyncio
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed

from pace_agent.engine.sglang.client import Refused, ServerClient
from pace_agent.engine.sglang.weights.kept import KeptWeights
from pace_agent.engine.sglang.weights.transports import (
    BUCKET_BYTES,
    CLOSING_SECONDS,
    STEP_SECONDS,
    Outcome,
    Steps,
    post,
    tensor_parallel,
)
from pace_agent.errors import EngineError

T = TypeVar("T")
c10d: Any = torch.distributed
"""Untyped: its stubs lack half of what is used here."""
_numbers = itertools.count()


class GroupTransport:
    """Broadcasts from `device`: over gloo from "cpu", over NCCL from a CUDA device, which must be no server's.

    `address` is where servers reach this process; empty: this machine's address towards each server.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        address: str = "",
        step_seconds: float = STEP_SECONDS,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._device = torch.device(device)
        self._address = address
        self._step_seconds = step_seconds
        self._bucket_bytes = bucket_bytes
        self._links: dict[str, Link] = {}
        self._clients: dict[str, ServerClient] = {}

    async def send(self, servers: Sequence[ServerClient], weights: KeptWeights, version: int) -> Outcome:
        known = set(self._links)
        steps = await self._send(servers, weights, version)
        # A group that was made for an earlier send may have ended with the server that was there then.
        again = [server for server in steps.failed(Refused) if server.url in known]
        if again:
            steps.outcome.update((await self._send(again, weights, version)).outcome)
        return steps.outcome

    async def _send(self, servers: Sequence[ServerClient], weights: KeptWeights, version: int) -> Steps:
        steps = Steps(servers, self._step_seconds)
        await steps.run(self._join)
        await steps.begin()
        buckets = weights.buckets(self._bucket_bytes)
        try:
            for number, names in enumerate(buckets):
                if not steps.going:
                    break
                body = self._announce(weights, names, version if number == len(buckets) - 1 else None)
                flat = await asyncio.to_thread(self._packed, weights, names)
                await steps.run(partial(self._broadcast, body=body, flat=flat))
        finally:
            await steps.end()
        answering = steps.failed(Refused)
        await asyncio.gather(*(self._leave(server.url, tell=server in answering) for server in steps.failed()))
        return steps

    def _announce(self, weights: KeptWeights, names: Sequence[str], version: int | None) -> dict[str, Any]:
        entries = [weights.entries[name] for name in names]
        return {
            "names": list(names),
            "dtypes": [entry.dtype for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
            "abort_all_requests": False,
            **({} if version is None else {"weight_version": str(version)}),
        }

    def _packed(self, weights: KeptWeights, names: Sequence[str]) -> torch.Tensor:
        flat = torch.empty(sum(weights.entries[name].size for name in names), dtype=torch.uint8)
        weights.pack(names, flat)
        return flat.to(self._device)

    async def _join(self, server: ServerClient) -> None:
        """Have a group with this server."""
        if server.url in self._links:
            return
        ranks = await tensor_parallel(server, self._step_seconds)
        address = self._address or _address_towards(server.url)
        link = Link(address, 1 + ranks, self._device, self._step_seconds)
        body = {
            "master_address": address,
            "master_port": link.port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": link.name,
            "backend": link.backend,
        }
        await self._both(server, link, "/init_weights_update_group", body, link.join)
        self._links[server.url], self._clients[server.url] = link, server

    async def _broadcast(self, server: ServerClient, body: dict[str, Any], flat: torch.Tensor) -> None:
        link = self._links[server.url]
        body = {**body, "group_name": link.name}
        await self._both(server, link, "/update_weights_from_distributed", body, lambda: link.broadcast(flat))

    async def _both(
        self, server: ServerClient, link: "Link", path: str, body: dict[str, Any], ours: Callable[[], None]
    ) -> None:
        """Call the server while this process does its part. When either fails, neither is waited for any longer."""
        call = asyncio.ensure_future(post(server, path, body, self._step_seconds))
        part = in_thread(ours)
        try:
            await asyncio.wait((call, part), timeout=self._step_seconds, return_when=asyncio.FIRST_EXCEPTION)
            if not (call.done() and part.done()) or call.exception() or part.exception():
                link.abort()
                await asyncio.wait((call, part), timeout=CLOSING_SECONDS)
            if call.done():
                call.result()  # the server's words, if it has any
            if part.done() and (failure := part.exception()):
                raise EngineError(f"{server.url}{path}: this side of the group failed: {failure}") from failure
            if not (call.done() and part.done()):
                raise EngineError(f"{server.url}{path} was not done within {self._step_seconds:g} s")
        except BaseException:
            link.abort()
            raise
        finally:
            call.cancel()
            part.cancel()

    async def _leave(self, url: str, *, tell: bool = True) -> None:
        link, server = self._links.pop(url, None), self._clients.pop(url, None)
        if link is None or server is None:
            return
        link.abort()
        if tell:
            with suppress(EngineError):
                body = {"group_name": link.name}
                await server.post("/destroy_weights_update_group", body, timeout=CLOSING_SECONDS)

    async def aclose(self) -> None:
        """Leave all groups; servers that still answer do so too."""
        await asyncio.gather(*map(self._leave, list(self._links)))


class Link:
    """This process as rank 0 of a group of `size`. `join` and `broadcast` block; `abort` may come from anywhere."""

    def __init__(self, address: str, size: int, device: torch.device, seconds: float) -> None:
        self._listener = socket.create_server((address, 0), family=_family(address))
        self.name = f"pace-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self.port: int = self._listener.getsockname()[1]
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._address = address
        self._size = size
        self._device = device
        self._limit = timedelta(seconds=seconds)
        self._group: Any = None

    def join(self) -> None:
        """Wait until every rank is there."""
        # The store listens on the address that servers were told, not, as it would by itself, on all of this machine's.
        store = c10d.TCPStore(
            self._address, self.port, self._size, True, self._limit, master_listen_fd=self._listener.detach()
        )
        # The prefixes under which torch's own init functions, which the servers use, meet in a store.
        for prefix in (self.name, f"{self.name}/", "cuda/" if self.backend == "nccl" else "cpu/"):
            store = c10d.PrefixStore(prefix, store)
        if self.backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            # Longer than ours: when NCCL's own watch finds a time-out it ends the process.
            options._timeout = self._limit * 2 + timedelta(minutes=10)
            self._group = c10d.ProcessGroupNCCL(store, 0, self._size, options)
        else:
            options = c10d.ProcessGroupGloo._Options()
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address)]
            options._timeout = self._limit
            self._group = c10d.ProcessGroupGloo(store, 0, self._size, options)

    def broadcast(self, flat: torch.Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own
        self._group.broadcast([flat], options).wait(self._limit)

    def abort(self) -> None:
        """Cut the connections. Twice is fine."""
        self._listener.close()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


def in_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `function` in a thread that the end of the process doesn't wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
            future.exception()  # whoever waited may be gone

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="pace-weights", daemon=True).start()
    return future


def _address_towards(url: str) -> str:
    """This machine's address on the way to a server."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"{url}: this machine's address towards it is unknown: {error}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
