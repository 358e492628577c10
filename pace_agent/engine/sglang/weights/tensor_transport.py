"""New weights through the memory that processes of one machine share.

A bucket of tensors is one block of shared memory, which each server maps. What travels over HTTP is where to find it:
a pickle of torch's own functions for tensors in a file of shared memory. It is written here by hand, since torch would
do so only under its sharing strategy `file_system`, which belongs to the whole process and so to its user.

What always holds: when a send is over, the names of its blocks are gone. A process that is killed in the middle leaves
them to torch's shared memory daemon, which removes them after the last server that used it.
"""

import asyncio
import base64
import fcntl
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.multiprocessing import reductions

from pace_agent.engine.sglang.client import ServerClient
from pace_agent.engine.sglang.weights.kept import KeptWeights
from pace_agent.engine.sglang.weights.transports import (
    BUCKET_BYTES,
    STEP_SECONDS,
    Outcome,
    Steps,
    post,
    tensor_parallel,
)
from pace_agent.errors import EngineError


class TensorTransport:
    """Servers map shared memory of this machine. Each bucket is filled once for all of them."""

    def __init__(self, *, step_seconds: float = STEP_SECONDS, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._step_seconds = step_seconds
        self._bucket_bytes = bucket_bytes

    async def send(self, servers: Sequence[ServerClient], weights: KeptWeights, version: int) -> Outcome:
        steps = Steps(servers, self._step_seconds)
        ranks: dict[str, int] = {}

        async def ask(server: ServerClient) -> None:
            await asyncio.to_thread(_check_here, server.url)
            ranks[server.url] = await tensor_parallel(server, self._step_seconds)

        await steps.run(ask)
        await steps.begin()
        buckets = weights.buckets(self._bucket_bytes)
        try:
            for number, names in enumerate(buckets):
                if not steps.going:
                    break
                last = {"weight_version": str(version)} if number == len(buckets) - 1 else {}
                opens = sum(ranks[server.url] for server in steps.going)
                block = await asyncio.to_thread(SharedBlock, weights, names, opens)
                try:
                    await steps.run(partial(self._post, block=block, last=last, ranks=ranks))
                finally:
                    block.unlink()
        finally:
            await steps.end()
        return steps.outcome

    async def _post(
        self, server: ServerClient, block: "SharedBlock", last: dict[str, Any], ranks: dict[str, int]
    ) -> None:
        body = {
            "serialized_named_tensors": [block.pickled] * ranks[server.url],
            "flush_cache": bool(last),
            "abort_all_requests": False,
            **last,
        }
        await post(server, "/update_weights_from_tensor", body, self._step_seconds)

    async def aclose(self) -> None:
        """Nothing is held."""


class SharedBlock:
    """Tensors end to end in shared memory, and the base64 pickle with which `opens` processes can map them."""

    def __init__(self, weights: KeptWeights, names: Sequence[str], opens: int) -> None:
        size = sum(weights.entries[name].size for name in names)
        try:
            with _keeping_stderr():
                self._storage = torch.UntypedStorage._new_using_filename_cpu(max(size, 1))
        except RuntimeError as error:
            raise EngineError(f"no shared memory of {size} bytes for new weights: {error}") from error
        manager, handle, length = self._storage._share_filename_cpu_()
        self._name = Path("/dev/shm") / handle.decode().lstrip("/")
        for _ in range(opens + 1):
            # Every process that maps it takes one off when it is done. One more than that, and none of them takes it
            # for the last user, so that the name is ours to remove whatever happened to them.
            self._storage._shared_incref()  # type: ignore[no-untyped-call]
        flat = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        weights.pack(names, flat)
        storage = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, manager, handle, length)
        named = []
        position = 0
        for name in names:
            entry = weights.entries[name]
            dtype: torch.dtype = getattr(torch, entry.dtype)
            typed = _Call(reductions.rebuild_typed_storage, storage, dtype)
            strides = torch.empty(entry.shape, device="meta").stride()
            place = (position // dtype.itemsize, entry.shape, strides, False)
            named.append((name, _Call(reductions.rebuild_tensor, torch.Tensor, typed, place)))
            position += entry.size
        self.pickled = base64.b64encode(pickle.dumps(named)).decode()

    def unlink(self) -> None:
        self._name.unlink(missing_ok=True)


@contextmanager
def _keeping_stderr() -> Iterator[None]:
    """Not handing down the error stream to the daemon that torch may start inside.

    It lives as long as the servers, and whoever reads our output from a pipe would wait for its end that long.
    """
    try:
        flags = fcntl.fcntl(2, fcntl.F_GETFD)
    except OSError:  # there is none
        yield
        return
    fcntl.fcntl(2, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
    try:
        yield
    finally:
        fcntl.fcntl(2, fcntl.F_SETFD, flags)


class _Call:
    """Pickles as a call, and so becomes what the call returns: once, however often it is referred to."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._parts = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._parts


def _check_here(url: str) -> None:
    """A server that can't find the memory would end, so one on another machine is not asked to."""
    host = urlsplit(url).hostname or ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)  # only an address of this machine can be bound
    except OSError as error:
        raise EngineError(
            f"{url} is not on this machine, so it can't be updated by tensor: use disk or group ({error})"
        ) from error
