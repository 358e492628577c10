"""The daemon: a client of it, what it can do, and calls to it beside the event loop."""

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from pace_agent.errors import SandboxError

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")

NONSENSE = (OSError, ValueError, KeyError, TypeError)
"""What the SDK raises for addresses that are none, and for servers that are no Docker daemon."""
THREADS = 16
"""Calls to the daemon at a time; each blocks a thread."""
INSTALL = "Get it by `pip install 'pace-agent[docker]'`."


class NotHere(SandboxError):
    """There is no docker to talk to."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class Daemon:
    """One connection to the daemon that DOCKER_HOST names, or the local one."""

    def __init__(self) -> None:
        self.client = connect()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")

    async def call(self, work: Callable[[], T]) -> T:
        """`work()` in a thread. SandboxError for what the daemon answers with an error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, told, work)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self.client.close()


def connect() -> "DockerClient":
    """NotHere if there is no SDK or no daemon."""
    try:
        import docker
        import requests
    except ImportError:
        raise NotHere("the docker SDK for Python is not installed", INSTALL) from None
    host = os.environ.get("DOCKER_HOST") or docker.constants.DEFAULT_UNIX_SOCKET
    try:
        _knock(host)
        # With a version it doesn't talk to the daemon yet: what can fail, fails where the client can be closed.
        asking = docker.from_env(version=docker.constants.DEFAULT_DOCKER_API_VERSION, timeout=10)
        try:
            spoken = asking.api.version(api_version=False)["ApiVersion"]
        finally:
            asking.close()
        return docker.from_env(version=spoken, max_pool_size=THREADS)
    except PermissionError as error:
        raise NotHere(
            f"this user may not talk to the Docker daemon at {host}",
            "Add it to the group docker, which is as good as giving it root.",
        ) from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, *NONSENSE) as error:
        raise NotHere(
            f"no Docker daemon answers at {host}: {reason(error)}",
            "Start it, or name another in DOCKER_HOST (unix:///PATH or tcp://HOST:PORT).",
        ) from error


def _knock(host: str) -> None:
    """OSError if nobody listens at a local socket: the SDK would leave its own half-open."""
    scheme, _, path = host.partition("://")
    if scheme in ("unix", "http+unix"):
        with socket.socket(socket.AF_UNIX) as trying:
            trying.settimeout(10)
            trying.connect("/" + path.lstrip("/"))


def told(work: Callable[[], T]) -> T:
    """What `work` returns; SandboxError, in the daemon's words, where it refuses or can't be reached."""
    import docker
    import requests

    try:
        return work()
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise SandboxError(f"docker: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The innermost words of an error of the SDK, which wraps what the daemon or the system said."""
    explanation = getattr(error, "explanation", None)
    while not explanation and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(explanation or error).strip().rstrip(".") or type(error).__name__


def attach(client: "DockerClient", container: str) -> socket.socket:
    """A socket to the standard streams of a container that was not started yet."""
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    stream: Any = client.api.attach_socket(container, wanted)
    raw = getattr(stream, "_sock", stream)
    if not isinstance(raw, socket.socket) or type(raw) is not socket.socket:
        raise SandboxError(f"docker: only unix:// and tcp:// without TLS are supported, not a {type(raw).__name__}")
    own = raw.dup()
    response = getattr(stream, "_response", None)
    if response is not None:
        response.close()  # its socket; the stream lives on in ours
    _attached.add(own)
    return own


_attached: "WeakSet[socket.socket]" = WeakSet()


def _let_go() -> None:
    """In a fork of this process: a copy of a stream would keep its container alive after us."""
    for stream in list(_attached):
        stream.close()


os.register_at_fork(after_in_child=_let_go)
