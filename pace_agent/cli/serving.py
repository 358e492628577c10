"""The SGLang servers of a run: started for it and stopped with it, or attached to; and the engine over them."""

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING

from pace_agent.cli.wiring import Parts, make_local
from pace_agent.clock import VirtualClock
from pace_agent.config import RunConfig
from pace_agent.engine.base import Engine
from pace_agent.errors import UserError
from pace_agent.report.progress import Progress
from pace_agent.rollout.limits import Limits

if TYPE_CHECKING:
    from pace_agent.engine.sglang.client import Keys
    from pace_agent.engine.sglang.engine import SGLangEngine

log = logging.getLogger(__name__)
GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Served:
    """Servers that a run may use. `ours` were started for it, with the model of the run."""

    urls: tuple[str, ...]
    keys: "Keys"
    ours: bool
    router_url: str | None = None


def check_httpx() -> None:
    """UserError where what speaks to servers is missing."""
    if find_spec("httpx") is None:
        raise UserError('SGLang servers need httpx, as the extra "sglang" of this package brings: pip install httpx')


def check_serving(config: RunConfig) -> None:
    """UserError for what can be told of `config.sglang` before anything starts."""
    section = config.sglang
    if config.engine.kind != "sglang":
        if section != type(section)():
            log.warning('settings of [sglang] count with engine.kind = "sglang" alone; this run uses the local engine')
        return
    check_httpx()
    from pace_agent.engine.sglang.serving.launch import ServerOptions, check_options

    if section.weights_dir is not None:
        try:
            section.weights_dir.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=section.weights_dir):
                pass
        except OSError as error:
            raise UserError(f"sglang.weights_dir = {str(section.weights_dir)!r} can't be written: {error}") from error
    if not section.urls:
        check_options(ServerOptions.of(section))


@contextmanager
def serving(
    config: RunConfig, model: Path, logs: Path, note: Callable[[str], None] | None = None
) -> Iterator[Served | None]:
    """The servers of `config`; None where the engine is not SGLang. What is started here is stopped at the end."""
    section = config.sglang
    if config.engine.kind != "sglang":
        yield None
        return
    from pace_agent.engine.sglang.client import Keys
    from pace_agent.engine.sglang.serving.launch import ServerOptions, launch
    from pace_agent.engine.sglang.serving.router import start_router

    if section.urls:
        keys = Keys(os.environ.get(section.api_key_env, ""), os.environ.get(section.admin_key_env, ""))
        urls, ours = tuple(section.urls), False
    with ExitStack() as stack:
        if not section.urls:
            options = ServerOptions.of(section, context=config.engine.context, skip_tokenizer=True)
            _leave_a_gpu(config)
            if note is not None:
                note(f"starting {section.servers} SGLang server{'s' * (section.servers > 1)}; logs in {logs}")
            servers = stack.enter_context(launch(options, model, logs))
            urls, keys, ours = servers.urls, servers.keys, True
        router_url = section.router_url
        if section.router != "none":
            router = start_router(section.router, logs, python=section.python or sys.executable)
            stack.callback(router.close)
            router_url = router.url
        yield Served(urls, keys, ours, router_url)


def _leave_a_gpu(config: RunConfig) -> None:
    """Let this process see one GPU that no server has. UserError where there is none."""
    section = config.sglang
    if section.device != "cuda" or not section.gpus or section.colocate:
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    seen = named.split(",") if named else [str(gpu) for gpu in range(there)]
    free = [gpu for gpu in seen if gpu not in map(str, section.gpus)]
    if not free:
        raise UserError(
            f"sglang.gpus = {section.gpus} leaves no GPU for the trainer, which sees {', '.join(seen) or 'none'}: "
            "give the servers fewer, or set sglang.colocate"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = free[0]


def make_engine(
    config: RunConfig,
    model: Path,
    limits: Limits,
    served: Served | None,
    *,
    process: bool,
    clock: VirtualClock | None = None,
) -> Engine:
    """The engine of `config.engine`: over `served`, or loaded from `model`, in a process of its own or in this one."""
    if served is None:
        return make_local(config, model, limits, process=process, clock=clock)
    return _sglang(config, model, limits, served)


def _sglang(config: RunConfig, model: Path, limits: Limits, served: Served) -> "SGLangEngine":
    from pace_agent.engine.sglang.engine import SGLangEngine, SGLangOptions
    from pace_agent.engine.sglang.probe import read_config
    from pace_agent.engine.sglang.serving.router import attach_router
    from pace_agent.engine.sglang.weights.kept import WeightKeeper
    from pace_agent.engine.sglang.weights.transports import make_transport

    section = config.sglang
    return SGLangEngine(
        served.urls,
        options=SGLangOptions(
            vocab_size=int(read_config(model)["vocab_size"]),
            context_length=config.engine.context or limits.context,
            stream_interval=section.stream_interval,
            stall_seconds=section.stall_seconds,
            wait_seconds=section.wait_seconds,
        ),
        transport=make_transport(section.update, section.device),
        keeper=WeightKeeper(model, folder=section.weights_dir, dtype=section.dtype),
        model=model,
        keys=served.keys,
        router=None if served.router_url is None else attach_router(served.router_url),
    )


class _Notes(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


@contextmanager
def showing_logs(progress: Progress) -> Iterator[None]:
    """Show this package's warnings above the progress display."""
    logger, handler = logging.getLogger("pace_agent"), _Notes(progress.note)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@asynccontextmanager
async def engine_for(config: RunConfig, parts: Parts, *, process: bool) -> AsyncIterator[tuple[Engine, Limits]]:
    """A started engine with the weights of `parts.model`, closed at the end, and the limits that it has room for."""
    check_serving(config)
    with TemporaryDirectory(prefix="pace-agent-") as logs, serving(config, parts.model, Path(logs)) as served:
        engine = make_engine(config, parts.model, parts.limits, served, process=process)
        try:
            info = await engine.start()
            if served is not None and not served.ours:
                await engine.pause()
                await engine.update_weights(parts.model, info.version)
                await engine.resume()
            yield engine, parts.limits.within(info.context_length)
        finally:
            await engine.aclose()
