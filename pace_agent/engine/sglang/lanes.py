"""Connections for hundreds of streams at once: a lane for each, which serves the next stream when it is free.

The pool of httpx looks at all connections, and asks the system about the idle ones, whenever a request begins or ends.
With 1,000 streams that takes nearly all of the client's time.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import httpx


class Lanes(httpx.AsyncBaseTransport):
    """As many connections as there are requests. One that was idle for `idle_seconds` is not used again."""

    def __init__(self, *, verify: bool, idle_seconds: float) -> None:
        self._tls = httpx.create_ssl_context(verify=verify, trust_env=False)
        self._idle_seconds = idle_seconds
        self._busy: set[httpx.AsyncHTTPTransport] = set()
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        lane = self._idle.pop()[1] if self._idle else self._open()
        self._busy.add(lane)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            self._busy.discard(lane)
            await lane.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Lent(response.stream, partial(self._end, lane, response.stream))
        return response

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=self._idle_seconds)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

    async def _end(self, lane: httpx.AsyncHTTPTransport, body: httpx.AsyncByteStream) -> None:
        """The lane of a stream is free, or closed with it where that ends badly."""
        self._busy.discard(lane)
        try:
            await body.aclose()
        except BaseException:
            await lane.aclose()
            raise
        now = time.monotonic()
        self._idle.append((now, lane))
        while now - self._idle[0][0] > self._idle_seconds:
            await self._idle.popleft()[1].aclose()

    async def aclose(self) -> None:
        lanes = [*self._busy, *(lane for _, lane in self._idle)]
        self._idle.clear()
        for lane in lanes:
            await lane.aclose()


class _Lent(httpx.AsyncByteStream):
    """A body, and what to do when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, end: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._end: Callable[[], Awaitable[None]] | None = end

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def aclose(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            await end()
