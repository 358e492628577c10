"""The command `serve`: SGLang servers that run until they are stopped, for one training run after the other."""

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pace_agent.cli.serving import check_httpx
from pace_agent.cli.wiring import model_folder
from pace_agent.config import RunConfig
from pace_agent.errors import RunError, UserError

if TYPE_CHECKING:
    from pace_agent.engine.sglang.serving.launch import Servers

LOOK_SECONDS = 0.5


def run(model: str, config: RunConfig) -> None:
    """Serve `model` until Ctrl-C or SIGTERM. RunError when no server is left."""
    section = config.sglang
    if section.urls:
        raise UserError(f"serve starts servers, but sglang.urls names running ones: {', '.join(section.urls)}")
    folder = model_folder(model)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _serve(model, folder, config)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(model: str, folder: Path, config: RunConfig) -> None:
    check_httpx()
    from pace_agent.engine.sglang.serving.launch import ServerOptions, launch
    from pace_agent.engine.sglang.serving.router import start_router

    section = config.sglang
    options = ServerOptions.of(section, context=config.engine.context)
    logs = config.run.dir or Path("runs") / f"serve-{time.strftime('%Y%m%d-%H%M%S')}"
    count = "an SGLang server" if section.servers == 1 else f"{section.servers} SGLang servers"
    print(f"starting {count}; logs in {logs}", file=sys.stderr)
    with ExitStack() as stack:
        servers = stack.enter_context(launch(options, folder, logs))
        router_url = section.router_url
        if section.router != "none":
            router = start_router(section.router, logs, python=options.interpreter)
            stack.callback(router.close)
            for url in servers.urls:
                asyncio.run(router.add(url))
            router_url = router.url
        print("\n".join(ready_lines(servers, section.device)))
        print("\n".join(attach_lines(model, config, servers, router_url, os.environ)), flush=True)
        while len(servers.given_up()) < len(servers.urls):
            time.sleep(LOOK_SECONDS)
        raise RunError("no server is left; their logs say why: " + ", ".join(map(str, servers.logs)))


def ready_lines(servers: "Servers", device: str) -> list[str]:
    """One line for each server."""
    pids = servers.pids()
    return [
        f"{url}  pid {pids.get(url, 'none')}  {_place(gpus, device)}  log {log}"
        for url, gpus, log in zip(servers.urls, servers.gpus, servers.logs, strict=True)
    ]


def _place(gpus: Sequence[int], device: str) -> str:
    return f"gpus {','.join(map(str, gpus))}" if gpus else device


def attach_lines(
    model: str, config: RunConfig, servers: "Servers", router_url: str | None, environ: Mapping[str, str]
) -> list[str]:
    """What to type to train with these servers, their keys first where the user doesn't know them yet."""
    section = config.sglang
    keys = {section.api_key_env: servers.keys.api, section.admin_key_env: servers.keys.admin}
    command = ["pace-agent", "train", "--engine.kind", "sglang", "--sglang.urls", ",".join(servers.urls)]
    if model != "embedded":
        command += ["--model", model]
    if section.device != "cuda":
        command += ["--sglang.device", section.device]
    if router_url:
        command += ["--sglang.router_url", router_url]
    for name in ("api_key_env", "admin_key_env"):
        if name in section.model_fields_set:
            command += [f"--sglang.{name}", getattr(section, name)]
    return [
        "To train with them:",
        *(f"  export {name}={key}" for name, key in keys.items() if not environ.get(name)),
        f"  {shlex.join(command)}",
    ]


def serve_settings(
    servers: int | None,
    gpus: str | None,
    tensor_parallel: int | None,
    device: str | None,
    port: int | None,
    router: str | None,
    passed_on: Sequence[str],
) -> list[str]:
    """The options of the command as settings. Without a number of servers, there are as many as the GPUs allow."""
    from pace_agent.config.toml import toml_value

    if gpus is not None and servers is None:
        servers = max(1, len(gpus.split(",")) // (tensor_parallel or 1))
    given = {
        "servers": servers,
        "gpus": gpus,
        "tensor_parallel": tensor_parallel,
        "device": device,
        "port": port,
        "router": router,
        "args": toml_value(list(passed_on)) if passed_on else None,
    }
    return [f"--sglang.{key}={value}" for key, value in given.items() if value is not None]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
