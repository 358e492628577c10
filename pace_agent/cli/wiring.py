"""From a configuration to the parts of a run.

What the user can get wrong is checked here, before anything heavy loads.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace_agent import registry
from pace_agent.clock import VirtualClock
from pace_agent.config import RunConfig
from pace_agent.config.models import SandboxSection
from pace_agent.costs import Costs
from pace_agent.engine.base import Engine
from pace_agent.errors import UserError
from pace_agent.rollout.adapter import AsyncEnv, as_async
from pace_agent.rollout.episode import Player
from pace_agent.rollout.limits import Limits
from pace_agent.sandbox import open_provider
from pace_agent.sandbox.base import Provider, SandboxSpec
from pace_agent.tasks import TaskSource
from pace_agent.tools.parsers import get_parser
from pace_agent.types import Message

if TYPE_CHECKING:
    from pace_agent.chat import ChatFormat


@dataclass(frozen=True, slots=True)
class Parts:
    """What every command that plays episodes needs."""

    model: Path
    chat: "ChatFormat"
    parse: Callable[[str], Message]
    env_id: str
    make_env: Callable[[], AsyncEnv]
    source: TaskSource
    limits: Limits
    provider: Provider | None
    """Opens sandbox sessions, where the environment needs them. The caller closes it."""

    def player(self, engine: Engine, limits: Limits, **settings: Any) -> Player:
        return Player(
            env_id=self.env_id,
            make_env=self.make_env,
            engine=engine,
            chat=self.chat,
            parse=self.parse,
            limits=limits,
            **settings,
        )


def wire(config: RunConfig) -> Parts:
    """Check the user's input and build what episodes are made of. UserError for anything that can't work."""
    from pace_agent.chat import ChatFormat

    model = model_folder(config.model.path)
    make_env, source, provider = _environment(config)
    chat = ChatFormat.from_pretrained(model)
    _check_chat(chat, make_env, config.env.id)
    context = config.rollout.max_context or config.engine.context or context_length(model)
    return Parts(
        model=model,
        chat=chat,
        parse=get_parser(config.model.tool_parser),
        env_id=config.env.id,
        make_env=make_env,
        source=source,
        limits=Limits(
            turns=config.rollout.max_turns,
            turn_tokens=config.rollout.max_turn_tokens,
            tokens=config.rollout.max_tokens,
            context=min(context, context_length(model)),
            tool_calls=config.rollout.max_tool_calls,
            seconds=config.rollout.max_seconds,
        ),
        provider=provider,
    )


def _check_chat(chat: "ChatFormat", make_env: Callable[[], AsyncEnv], env_id: str) -> None:
    """Refuse a template that drops tool results before every rollout fails on it."""
    tools = getattr(make_env(), "toolset", None)
    if tools is not None and tools.names() and not chat.shows_tool_results:
        raise UserError(
            f"{env_id} has tools, but the model's chat template does not render tool results (role 'tool'); "
            "use a model whose template does"
        )


def model_folder(path: str) -> Path:
    """The folder of a model; UserError where it is not one that can be loaded."""
    if path == "embedded":
        from pace_agent.cli.embedded import embedded_model

        return embedded_model()
    folder = Path(path).expanduser()
    if (folder / "config.toml").is_file():
        return _trained_model(folder)
    if not folder.is_dir():
        raise UserError(
            f"model.path = {path!r}: there is no such folder. Give a Hugging Face model folder, a run folder, "
            "or 'embedded'"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path = {path!r} holds no config.json: it is not a Hugging Face model folder")
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"model.path = {path!r} holds no *.safetensors: the weights are missing")
    return folder


def _trained_model(run: Path) -> Path:
    """The model of a run folder: at its end, else the best so far, else of the last checkpoint."""
    from pace_agent.trainers.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(run)
    for folder in (run / "final", run / "best", *([checkpoint] if checkpoint else [])):
        if (folder / "config.json").is_file():
            return folder
    raise UserError(f"{run} is a run folder without a model: it saved no checkpoint")


def context_length(model: Path) -> int:
    """The longest sequence that the model's config allows."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return int(config.get("max_position_embeddings", 1 << 20))


def make_local(
    config: RunConfig, model: Path, limits: Limits, *, process: bool, clock: VirtualClock | None = None
) -> Engine:
    """The local engine of `config.engine`, loaded from `model`, in a process of its own or in this one.

    On virtual time `clock` says what its steps cost; it must be in this process then.
    """
    from pace_agent.engine.local import make_local_engine

    return make_local_engine(
        model,
        process=process,
        max_slots=config.engine.slots,
        context_length=config.engine.context or limits.context,
        dtype=config.model.dtype,
        threads=config.engine.threads,
        stale_cache=config.engine.stale_cache,
        clock=clock,
        costs=None if clock is None else costs_of(config),
    )


def costs_of(config: RunConfig) -> Costs:
    """What things cost on virtual time; the engine is full with as many rollouts as may run, or as it has slots."""
    slots, concurrency = config.engine.slots, config.rollout.concurrency
    return config.clock.costs(rows=slots if concurrency == "auto" else min(concurrency, slots))


def _environment(config: RunConfig) -> tuple[Callable[[], AsyncEnv], TaskSource, Provider | None]:
    """A maker of environments, their tasks, and the sandbox provider if they need one."""
    section = config.env
    kwargs: dict[str, Any] = dict(section.kwargs)
    for key in ("tasks", "reward"):
        if getattr(section, key) is not None:
            kwargs[key] = getattr(section, key)
    env = registry.make(section.id, **kwargs)
    inner = env.unwrapped
    toolset = getattr(inner, "toolset", None)
    if toolset is None:
        env.close()
        seeds = registry.task_source(section.id, **kwargs)
        return lambda: as_async(registry.make(section.id, **kwargs)), seeds, None
    if env.spec is not None:
        kwargs = {**env.spec.kwargs, **kwargs}
    source = getattr(inner, "tasks", None)
    if not isinstance(source, TaskSource):
        raise UserError(f"{section.id} has no tasks: set the class attribute `tasks` or give env.tasks")
    # Files are read once, not once per rollout.
    if section.tasks is not None:
        kwargs["tasks"] = source
    provider = None
    if toolset.needs_session and config.clock.kind == "virtual":
        raise UserError(
            f'clock.kind = "virtual": {section.id} runs code in a sandbox, which takes real time; '
            'use clock.kind = "wall" for it'
        )
    if toolset.needs_session:
        provider = kwargs["sandbox"] = open_sandbox(config.sandbox)
    env.close()
    kind = type(inner)
    return lambda: as_async(kind(**kwargs)), source, provider


def open_sandbox(section: SandboxSection) -> Provider:
    """The provider that the configuration asks for, not yet started. UserError if it can't work here."""
    spec = SandboxSpec(
        timeout=section.timeout,
        memory=section.memory_mib << 20,
        processes=section.processes,
        disk=section.disk_mib << 20,
        files=section.files,
        cpu_seconds=section.cpu_seconds,
        captured=section.output_kib << 10,
        modules=tuple(section.modules),
    )
    return open_provider(
        section.backend,
        unsafe=section.unsafe,
        spec=spec,
        prewarm=section.prewarm,
        packages=section.packages,
        image=section.image,
        runtime=section.runtime,
    )
