"""One SGLang server over HTTP: JSON calls, and the stream of a generation.

What always holds:

* Nothing here retries. A call that got no answer raises `Unreachable`, one that was refused raises `Refused`.
* Generation carries the API key, control the admin key, and neither follows a redirect or a proxy of the environment.
* A stream has no read time-out: whoever waits for it decides how long.

The messages that SGLang answers with, and where it puts them, are those of 0.5.23.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pace_agent.engine.sglang.lanes import Lanes
from pace_agent.errors import EngineError

CONNECT_SECONDS = 10.0
OLDEST = "0.5.23"
"""The release of SGLang whose answers were measured; older ones may not stamp tokens."""


class Unreachable(EngineError):
    """No answer: the server is gone, or the connection was cut."""


class NoAnswer(Unreachable):
    """The server is there, and did not answer in time."""


class Refused(EngineError):
    """The server answered, and said no. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether asking again may help: the server is overloaded, or something broke inside it."""
        return self.status == 429 or self.status >= 500


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens a server. Empty where it wants none; an empty `admin` falls back to `api`, as the server does."""

    api: str = ""
    admin: str = ""

    def headers(self, *, control: bool) -> dict[str, str]:
        key = (self.admin or self.api) if control else self.api
        return {"Authorization": f"Bearer {key}"} if key else {}


class ServerClient:
    """Calls to the server at `url`. Close it with `aclose`."""

    def __init__(self, url: str, keys: Keys | None = None) -> None:
        self.url = url.rstrip("/")
        self._keys = keys or Keys()
        # SGLang closes idle connections after 5 s: ours expire before. A call that meets a closing one looks as if the
        # server had gone, so those that decide about servers have a connection each.
        verify = self.url.startswith("https:")  # loading certificates takes a third of a second
        self._streams = self._open(Lanes(verify=verify, idle_seconds=2.0))
        alone = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._calls = self._open(httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=alone))

    def _open(self, transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            follow_redirects=False,
            transport=transport,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        )

    async def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        """The JSON object at `path`, with the API key."""
        return await self._call("GET", path, None, self._keys.headers(control=False), timeout)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None) -> dict[str, Any]:
        """A control call, with the admin key. An answer without a body is an empty object."""
        return await self._call("POST", path, body, self._keys.headers(control=True), timeout)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: dict[str, str], timeout: float | None
    ) -> dict[str, Any]:
        limit = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        try:
            response = await self._calls.request(method, path, json=body, headers=headers, timeout=limit)
        except httpx.ConnectTimeout as error:
            raise Unreachable(f"{self.url} can't be reached within {CONNECT_SECONDS:g} s") from error
        except httpx.TimeoutException as error:
            raise NoAnswer(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.url}{path} can't be reached: {_cause(error)}") from error
        if response.status_code >= 300:
            raise self._refusal(path, response.status_code, response.content)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError:
            return {"message": response.text}  # /flush_cache and others answer in words
        return answer if isinstance(answer, dict) else {"data": answer}

    @asynccontextmanager
    async def stream(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST /generate: the raw bytes of its stream of events, as they come."""
        try:
            # Compressed bytes would not be events, and small ones would wait for more.
            headers = {"Accept-Encoding": "identity", **self._keys.headers(control=False), **(headers or {})}
            async with self._streams.stream("POST", "/generate", json=body, headers=headers) as response:
                if response.status_code != 200:
                    raise self._refusal("/generate", response.status_code, await response.aread())
                yield response.aiter_raw()
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.url}/generate was cut: {_cause(error)}") from error

    def _refusal(self, path: str, status: int, content: bytes) -> Refused:
        said = message_of(content)
        where = f"{self.url}{path}"
        if status in (401, 403):
            control = path not in ("/generate", "/model_info", "/server_info", "/v1/models")
            name, setting = ("admin key", "admin_key_env") if control else ("API key", "api_key_env")
            return Refused(
                f"{where}: the server refused the {name} (HTTP {status}): export the one that it was started with "
                f"(`pace-agent serve` prints it) as the variable that sglang.{setting} names",
                status,
            )
        if status == 404:
            return Refused(
                f"{where}: there is no such call (HTTP 404). Is this an SGLang server of {OLDEST} or newer?", status
            )
        return Refused(f"{where}: HTTP {status}: {said}", status)

    async def aclose(self) -> None:
        await self._streams.aclose()
        await self._calls.aclose()


def message_of(content: bytes) -> str:
    """What an error's body says, whichever of the server's shapes it has."""
    try:
        answer = json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace") or "no message"
    while isinstance(answer, dict):
        inner = answer.get("error", answer.get("message", answer.get("detail")))
        if inner is None:
            break
        answer = inner
    return str(answer)[:1000]


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
