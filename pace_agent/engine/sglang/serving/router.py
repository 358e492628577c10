"""A router in front of the servers: `sglang-router` or `smg`, started here or running already.

Generation may go through it; control calls go to each server. What was measured with sglang-router 0.3.2 and smg 1.13:

* Both list, take and drop workers while they run, under `/workers`. They do so in the background: the calls here return
  when the list says so.
* Both pass a caller's `Authorization` on to the server. A worker's own key, where it was added with one, serves for
  callers that bring none, so that whoever reaches the router could generate. So workers are added without keys here,
  and with the words that smg would else ask them for: without these it gives up a server that wants a key.
* Both keep requests with one `X-SMG-Routing-Key` on one worker: smg with the policy `consistent_hashing`,
  sglang-router with `manual`. A key moves when its worker is dropped.
* smg takes seconds to drop a worker, up to some twenty.
* Both drop sampling parameters that they don't know, such as `stream_interval`; sglang-router drops unknown top-level
  keys of a request as well. `rid`, `return_logprob` and `sampling_seed` arrive.
* Both install a command named `smg`: what is started here is the module.

Retries, health checks and circuit breakers are off: the engine resumes what was cut, and a health check generates a
token, which a paused server can't.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from pace_agent.engine.sglang.serving.keeping import (
    KeptProcess,
    close_all,
    environment_for,
    free_ports,
    has_module,
    status_of,
    wait_ready,
)
from pace_agent.errors import EngineError, UserError

RouterKind = Literal["sglang-router", "smg"]
ROUTING_HEADER = "X-SMG-Routing-Key"
START_SECONDS = 180.0
WORKER_SECONDS = 60.0
"""For a worker to appear in the list, or to leave it."""
CALL_SECONDS = 10.0
REQUEST_SECONDS = 7 * 24 * 3600
"""What a router may let a generation take: the engine has a watchdog of its own."""


@dataclass(frozen=True, slots=True)
class _Kind:
    module: str
    policy: str


KINDS: Mapping[RouterKind, _Kind] = {
    "sglang-router": _Kind("sglang_router", "manual"),
    "smg": _Kind("smg", "consistent_hashing"),
}


class Router:
    """A running router. Made by `start_router` or `attach_router`; `close` stops it if it was started here.

    A router that ends on its own is started again, with the workers that it had.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._kept: KeptProcess | None = None
        self._workers: dict[str, None] = {}

    @property
    def pid(self) -> int | None:
        """Of the router's process, where it was started here and runs."""
        return self._kept.pid if self._kept else None

    @property
    def given_up(self) -> bool:
        """Whether it ended too often to be started again."""
        return self._kept is not None and self._kept.gone

    def headers(self, routing_key: str) -> dict[str, str]:
        """What keeps requests with the same `routing_key` on one worker."""
        return {ROUTING_HEADER: routing_key}

    async def workers(self) -> dict[str, str]:
        """The id of each worker by its URL. EngineError where the router doesn't answer as one should."""
        answer = await self._call("GET", "/workers")
        try:
            return {str(worker["url"]).rstrip("/"): str(worker["id"]) for worker in answer["workers"]}
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self.url}/workers answers as neither sglang-router (0.3 or newer) nor smg does: it has no list of "
                "workers with their ids, so none can be removed"
            ) from error

    async def add(self, url: str) -> None:
        """Let the router send work to the server at `url`. Returns when it does so; fine if it did already."""
        url = url.rstrip("/")
        self._workers[url] = None
        if url not in await self.workers():
            await self._call("POST", "/workers", worker_of(url), fine=(409,))
            await self._until(url, listed=True)

    async def remove(self, url: str) -> None:
        """Send no new work to `url`. Returns when none can go there any more; fine if the router doesn't know it."""
        url = url.rstrip("/")
        self._workers.pop(url, None)
        if (worker := (await self.workers()).get(url)) is not None:
            await self._call("DELETE", f"/workers/{worker}", fine=(404,))
            await self._until(url, listed=False)

    async def _until(self, url: str, *, listed: bool) -> None:
        deadline = time.monotonic() + WORKER_SECONDS
        while (url in await self.workers()) != listed:
            if time.monotonic() > deadline:
                verb = "take" if listed else "drop"
                raise EngineError(f"the router {self.url} did not {verb} the server {url} within {WORKER_SECONDS:g} s")
            await asyncio.sleep(0.1)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, fine: Sequence[int] = ()
    ) -> Any:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=CALL_SECONDS) as client:
                response = await client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"the router {self.url} can't be reached: {str(error) or type(error).__name__}"
            ) from error
        status = response.status_code
        if status in (401, 403):
            raise EngineError(
                f"the router {self.url} wants a key for changes of its workers (HTTP {status}), which this package "
                "doesn't give: start it without control-plane keys, or leave sglang.router_url out"
            )
        if status >= 300 and status not in fine:
            raise EngineError(f"the router {self.url}{path} answered HTTP {status}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError:
            return None

    def close(self) -> None:
        """Stop it, where it was started here."""
        if self._kept is not None:
            close_all([self._kept])


def attach_router(url: str) -> Router:
    """A router that runs already. It isn't asked anything yet."""
    return Router(url)


def start_router(kind: RouterKind, log_folder: Path, *, python: str, port: int = 0) -> Router:
    """Start a router without workers on the loopback interface, and wait until it answers.

    Args:
        python: the interpreter that has it.
        port: to listen on; 0: any free one.

    Raises:
        UserError: it isn't installed there, or the port is taken.
        RunError: it ended, or didn't answer in time.
    """
    environment = environment_for(python)
    if not has_module(python, KINDS[kind].module, environment):
        raise UserError(f'sglang.router = "{kind}": {python} does not have it. Install it there: pip install {kind}')
    chosen = free_ports(1, port)[0]
    metrics = free_ports(1)[0]
    router = Router(f"http://127.0.0.1:{chosen}")
    log_folder.mkdir(parents=True, exist_ok=True)
    kept = router._kept = KeptProcess(
        f"the router {router.url}",
        partial(router_command, kind, python, chosen, metrics),
        is_ready=partial(_is_ready, router, chosen),
        environment=environment,
        log=(log_folder / f"{kind}.log").resolve(),
        start_seconds=START_SECONDS,
    )
    try:
        kept.start()
        wait_ready([kept])
    except BaseException:
        router.close()
        raise
    return router


def router_command(kind: RouterKind, python: str, port: int, metrics_port: int) -> list[str]:
    """The command of a router without workers."""
    return [
        *(python, "-m", f"{KINDS[kind].module}.launch_router", "--policy", KINDS[kind].policy),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--request-timeout-secs", str(REQUEST_SECONDS), "--shutdown-grace-period-secs", "1"),
        *("--worker-startup-check-interval", "1", "--disable-health-check"),
        *("--disable-retries", "--disable-circuit-breaker", "--log-level", "warn"),
    ]


def worker_of(url: str) -> dict[str, Any]:
    """What a router is told about a server. It would ask the server for the rest, which wants a key for that."""
    return {
        "url": url,
        "disable_health_check": True,
        "runtime_type": "sglang",
        "connection_mode": "http",
        "models": [{"id": "model"}],
    }


def _is_ready(router: Router, port: int) -> bool:
    """Whether it answers. One that was started again is given its workers back."""
    if status_of(port, "/workers") != 200:
        return False
    with httpx.Client(trust_env=False, timeout=CALL_SECONDS) as client:
        for url in tuple(router._workers):
            client.post(f"{router.url}/workers", json=worker_of(url))
    return True
