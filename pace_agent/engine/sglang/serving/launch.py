"""Start SGLang servers on this machine, keep them running, and stop them.

What always holds:

* They listen on the loopback interface alone, and every call needs a key, which no list of processes shows. SGLang
  writes them to its log, which only this user may read; and its `/server_info` tells the admin key to whoever has the
  API key: the two keep honest callers apart, no others.
* They end with the process that started them, however that ends.
* A server that ends on its own is started again on its port, with the weights of its model folder: whoever sends it
  work must look at its weight version first. One that keeps ending is given up.
"""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from pace_agent.engine.sglang.serving.keeping import (
    KeptProcess,
    close_all,
    environment_for,
    free_ports,
    has_module,
    status_of,
    wait_ready,
)
from pace_agent.engine.sglang.serving.processes import SECRET_PATH
from pace_agent.errors import UserError

if TYPE_CHECKING:
    from pace_agent.config import SglangSection
    from pace_agent.engine.sglang.client import Keys

RESERVED = ("--model-path", "--model", "--host", "--port", "--config", "--api-key", "--admin-api-key")
"""Flags that the launcher must know the values of."""
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.2", "--max-total-tokens", "16384"),
    *("--sleep-on-idle", "--skip-server-warmup"),
)
"""What SGLang needs on a CPU. Its cache holds 16,384 tokens, or fewer where a fifth of the free memory is less. Without
`--sleep-on-idle` an idle server keeps a core busy."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start servers; the fields named as those of `SglangSection` mean the same."""

    servers: int = 1
    gpus: tuple[int, ...] = ()
    tensor_parallel: int = 1
    device: Literal["cuda", "cpu"] = "cuda"
    port: int = 0
    python: str = ""
    args: tuple[str, ...] = ()
    start_seconds: float = 600.0
    api_key_env: str = "SGLANG_API_KEY"
    admin_key_env: str = "SGLANG_ADMIN_API_KEY"
    dtype: str = "bfloat16"
    context: int | None = None
    """Longest sequence; None: what the model's config says."""
    skip_tokenizer: bool = False
    """Start without a tokenizer also where the model has one: token ids are all that training needs."""
    memory_saver: bool = False
    """Let the server give its memory up on demand, for a trainer on the same GPU."""

    @classmethod
    def of(
        cls,
        section: "SglangSection",
        *,
        context: int | None = None,
        skip_tokenizer: bool = False,
    ) -> Self:
        """The options that a configuration gives."""
        return cls(
            servers=section.servers,
            gpus=tuple(section.gpus),
            tensor_parallel=section.tensor_parallel,
            device=section.device,
            port=section.port,
            python=section.python,
            args=tuple(section.args),
            start_seconds=section.start_seconds,
            api_key_env=section.api_key_env,
            admin_key_env=section.admin_key_env,
            dtype=section.dtype,
            context=context,
            skip_tokenizer=skip_tokenizer,
            memory_saver=section.colocate,
        )

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable


def launch(options: ServerOptions, model: Path, log_folder: Path) -> "Servers":
    """Start the servers for the folder `model` and wait until all of them serve. Logs go to files in `log_folder`.

    Raises:
        UserError: SGLang isn't there, a port is taken, or a flag or key can't be used.
        RunError: a server ended or didn't get ready in time; the others are stopped then.
    """
    check_options(options)
    keys = _keys(options, os.environ)
    ports = free_ports(options.servers, options.port)
    log_folder.mkdir(parents=True, exist_ok=True)
    kept = [
        KeptProcess(
            f"the server http://127.0.0.1:{port}",
            partial(server_command, options, model.resolve(), port),
            is_ready=partial(_answers, port, keys.api),
            environment=_environment(options, index),
            log=(log_folder / f"sglang-{index}.log").resolve(),
            start_seconds=options.start_seconds,
            secret=_secret_config(keys),
            hide=(keys.api, keys.admin),
        )
        for index, port in enumerate(ports)
    ]
    servers = Servers(options, ports, keys, kept)
    try:
        for process in kept:
            process.start()
        wait_ready(kept)
    except BaseException:
        servers.close()
        raise
    return servers


class Servers:
    """Running servers. Closing stops them all; so does the end of this process."""

    def __init__(self, options: ServerOptions, ports: Sequence[int], keys: "Keys", kept: Sequence[KeptProcess]) -> None:
        self._kept = kept
        self.keys = keys
        self.urls: tuple[str, ...] = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self.gpus: tuple[tuple[int, ...], ...] = tuple(_share(options, index) for index in range(options.servers))
        self.logs: tuple[Path, ...] = tuple(process.log for process in kept)

    def pids(self) -> dict[str, int]:
        """The main process of each server that runs now, by its URL."""
        return {url: kept.pid for url, kept in zip(self.urls, self._kept, strict=True) if kept.pid is not None}

    def given_up(self) -> tuple[str, ...]:
        """The servers that ended too often and won't be started again."""
        return tuple(url for url, kept in zip(self.urls, self._kept, strict=True) if kept.gone)

    def close(self) -> None:
        """Stop them and wait until nothing of them is left."""
        close_all(self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answers(port: int, key: str) -> bool:
    """Whether the server answers, and is done with the first request that it sends itself."""
    return all(status_of(port, path, key) == 200 for path in ("/model_info", "/health"))


def server_command(options: ServerOptions, model: Path, port: int) -> list[str]:
    """The command of one server; the word {secret} stands for the path of a file with its keys."""
    tokenizer = any((model / name).is_file() for name in TOKENIZER_FILES)
    return [
        *(options.interpreter, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--config", SECRET_PATH, "--dtype", options.dtype, "--tp-size", str(options.tensor_parallel)),
        *("--weight-version", "0", "--incremental-streaming-output"),
        *(() if tokenizer and not options.skip_tokenizer else ("--skip-tokenizer-init",)),
        *(("--context-length", str(options.context)) if options.context else ()),
        *(("--enable-memory-saver",) if options.memory_saver else ()),
        *(CPU_FLAGS if options.device == "cpu" else ()),
        *options.args,
    ]


def _secret_config(keys: "Keys") -> str:
    """The part of a server's flags that others mustn't see. JSON is YAML too."""
    return json.dumps({"api-key": keys.api, "admin-api-key": keys.admin})


def check_options(options: ServerOptions) -> None:
    """UserError for flags that the launcher sets itself, GPUs that don't fit, and an interpreter without SGLang."""
    for arg in options.args:
        if (flag := arg.partition("=")[0]) in RESERVED:
            hint = "the keys come from the environment" if "key" in flag else "the launcher sets it"
            raise UserError(f"sglang.args can't hold {flag}: {hint}")
    wanted = options.servers * options.tensor_parallel
    if options.gpus and len(options.gpus) != wanted:
        raise UserError(f"sglang.gpus = {list(options.gpus)} are {len(options.gpus)}, but the servers need {wanted}")
    python = options.interpreter
    if not has_module(python, "sglang", _environment(options, 0)):
        raise UserError(
            f"{python} has no SGLang. Install it there (pip install sglang), or name the interpreter that has it by "
            "sglang.python, or servers that run already by sglang.urls"
        )


def _keys(options: ServerOptions, environ: Mapping[str, str]) -> "Keys":
    from pace_agent.engine.sglang.client import Keys

    for name in (options.api_key_env, options.admin_key_env):
        if (key := environ.get(name, "")) and (key.startswith("-") or not key.isprintable() or " " in key):
            raise UserError(f"the key in {name} can't be used: it begins with '-', or holds a space")
    return Keys(
        api=environ.get(options.api_key_env) or secrets.token_hex(24),
        admin=environ.get(options.admin_key_env) or secrets.token_hex(24),
    )


def _share(options: ServerOptions, index: int) -> tuple[int, ...]:
    """The GPUs of one server."""
    return options.gpus[index * options.tensor_parallel : (index + 1) * options.tensor_parallel]


def _environment(options: ServerOptions, index: int) -> dict[str, str]:
    """That of the server `index`."""
    environment = environment_for(options.interpreter, hidden=(options.api_key_env, options.admin_key_env))
    environment["HF_HUB_OFFLINE"] = "1"  # the model is a folder
    if options.device == "cpu":
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, _share(options, index)))
    return environment
