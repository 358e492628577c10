"""The section of SGLang servers, and which of its keys go together.

Keys that open a server are secrets, and a config is kept in every run folder: the section holds the names of the
environment variables that hold them.
"""

import re
from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from pace_agent.config.section import FolderPath, Positive, Seconds, Section


def server_url(text: str) -> str:
    """`text` as http(s)://HOST[:PORT], without a slash at its end; ValueError for anything else."""
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        bare = parts._replace(scheme="", netloc="").geturl() == ""
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # a port that is no number, a bracket that isn't closed
        bare = fits = False
    if "@" in url:
        raise ValueError("the address of a server can't hold a user or password; write http://HOST:PORT")
    if not (bare and fits) or re.search(r"\s", url):
        raise ValueError(f"{text!r} is not the address of a server; write http://HOST:PORT, without a path")
    return url


def variable_name(text: str) -> str:
    """`text`, where it can name an environment variable; ValueError otherwise, without showing it: it may be a key."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError("sglang.api_key_env and sglang.admin_key_env name environment variables; they hold no keys")
    return text


def is_loopback(url: str) -> bool:
    """Whether `url` leads to this machine by its loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ServerUrl = Annotated[str, AfterValidator(server_url)]
VariableName = Annotated[str, AfterValidator(variable_name)]


class SglangSection(Section):
    """SGLang servers: those that run already, or how to start them. Counts with `engine.kind = "sglang"` alone."""

    urls: list[ServerUrl] = Field(default_factory=list)
    """Servers that run already, as http://HOST:PORT. Empty: they are started here, and stopped at the end."""
    servers: Positive = 1
    """Servers to start, each with a whole copy of the model."""
    gpus: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """GPUs of the servers to start, `tensor_parallel` for each, in order, as CUDA_VISIBLE_DEVICES counts them. Empty:
    each server takes what it sees."""
    tensor_parallel: Positive = 1
    """GPUs that one server spreads the model over."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the servers compute on. `cpu` is for trying things out."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the servers' weights, whatever the trainer's are: weights are converted before they are sent."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first server; the others take the next ones. 0: any free ports."""
    python: str = ""
    """The Python interpreter of the environment that SGLang is installed in. Empty: this one."""
    args: list[str] = Field(default_factory=list)
    """More flags for `sglang.launch_server`. They come last and win over what is set here."""
    router: Literal["none", "sglang-router", "smg"] = "none"
    """A router to start in front of the servers: the package `sglang-router` or `smg`. `none`: this package spreads
    the rollouts itself, and keeps each one on its server."""
    router_url: ServerUrl | None = None
    """A router that runs already in front of `urls`. It passes generation on; control goes to each server."""
    update: Literal["disk", "tensor", "group"] = "disk"
    """How weights reach the servers: by files that they read (`disk`, works everywhere), by shared tensors on the same
    machine (`tensor`), or by a process group that they join (`group`: NCCL between GPUs)."""
    weights_dir: FolderPath | None = None
    """Folder for `update = "disk"`, under one path on every machine. Empty: the shared memory of this machine."""
    stream_interval: Positive = 8
    """Tokens between two messages of a server. Fewer lose less when one dies; more cost less work."""
    stall_seconds: Seconds = 120.0
    """Seconds without a token after which a generation is given up and sent again. Pauses don't count."""
    wait_seconds: Seconds = 300.0
    """Seconds to wait for a server to return when none is left; then the run stops."""
    start_seconds: Seconds = 600.0
    """Seconds for a server to load its model."""
    colocate: bool = False
    """Trainer and servers on the same GPUs: servers give their memory up while the trainer works. For
    `pool.policy = "sync"` alone."""
    api_key_env: VariableName = "SGLANG_API_KEY"
    """Name of the environment variable that holds the key for generation. Where it is unset, servers that are started
    here get a random key, and running ones are called without."""
    admin_key_env: VariableName = "SGLANG_ADMIN_API_KEY"
    """Name of the environment variable that holds the key for control. Where it is unset, servers that are started here
    get a random key, and running ones are called with the key for generation."""


def check_sglang(section: SglangSection) -> None:
    """ValueError where keys of the section contradict each other."""
    _check_started(section)
    _check_attached(section)
    _check_update(section)


def _check_started(section: SglangSection) -> None:
    gpus, wanted = section.gpus, section.servers * section.tensor_parallel
    if repeated := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        raise ValueError(f"sglang.gpus = {gpus} names {', '.join(map(str, repeated))} more than once")
    if gpus and len(gpus) != wanted:
        raise ValueError(
            f"sglang.gpus = {gpus} are {len(gpus)}, but sglang.servers = {section.servers} times "
            f"sglang.tensor_parallel = {section.tensor_parallel} needs {wanted}"
        )
    if section.port and section.port + section.servers - 1 > 65535:
        raise ValueError(f"sglang.port = {section.port} leaves no room for sglang.servers = {section.servers}")


def _check_attached(section: SglangSection) -> None:
    if repeated := [url for index, url in enumerate(section.urls) if url in section.urls[:index]]:
        raise ValueError(f"sglang.urls names {repeated[0]} more than once")
    for key in ("servers", "gpus", "args"):
        value = getattr(section, key)
        if section.urls and value not in (1, []):
            raise ValueError(
                f"sglang.{key} = {value!r} is for servers that are started here, but sglang.urls names running ones; "
                "leave one of the two out"
            )
    if section.router_url and not section.urls:
        raise ValueError(
            f"sglang.router_url = {section.router_url!r} needs sglang.urls, the servers behind it: "
            "weights go to each of them"
        )


def _check_update(section: SglangSection) -> None:
    far = [url for url in section.urls if not is_loopback(url)]
    if not far:
        return
    if section.colocate:
        raise ValueError(f"sglang.colocate = true, but {far[0]} is not on this machine")
    if section.update == "tensor":
        raise ValueError(
            f'sglang.update = "tensor" shares memory, but {far[0]} is not on this machine; use "disk" or "group"'
        )
    if section.update == "disk" and section.weights_dir is None:
        raise ValueError(
            f'sglang.update = "disk" needs sglang.weights_dir, a folder that {far[0]} sees under the same path, '
            'or use sglang.update = "group"'
        )
