"""The rollout side of a training run: how its runtime is built, and what the trainer's process asks it.

Everything here is a function of a module, so that it can be asked of a runtime in another process.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pace_agent.cli.evaluate import evaluate
from pace_agent.cli.serving import Served, make_engine
from pace_agent.cli.wiring import costs_of, wire
from pace_agent.clock import VirtualClock, WallClock
from pace_agent.config import RunConfig
from pace_agent.engine.base import Engine
from pace_agent.evaluation.metrics import EvalResult
from pace_agent.evaluation.runner import EvalPlan
from pace_agent.ledger import Ledger
from pace_agent.pool import PacePool, PoolOptions, PoolSummary
from pace_agent.rollout import handle
from pace_agent.rollout.handle import RuntimeHandle
from pace_agent.rollout.inline import RuntimeInline
from pace_agent.rollout.journal import Journal
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.tasks import TaskQueue
from pace_agent.types import Sample

POOL_SETTINGS = (
    *("policy", "unit", "beta", "cap", "lam", "staleness"),
    *("order", "fairness", "bins", "max_staleness", "eta"),
)
"""Settings that the pool takes as they are; the others count trajectories there and units here."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What the rollout side knows of a run that has ended."""

    pool: PoolSummary
    ledger: Mapping[str, int]
    reasons: Mapping[str, Mapping[str, int]]
    policy_version: int
    interrupted_total: int
    incarnation: int


def open_runtime(config: RunConfig, folder: Path, *, start_over: bool, served: Served | None = None) -> RuntimeHandle:
    """The runtime beside the trainer: in a process of its own with the engine, or in a thread of this one."""
    if config.engine.process:
        from pace_agent.rollout.process import RuntimeProcess

        return RuntimeProcess(partial(_build_in_process, config, folder, start_over=start_over, served=served))
    from pace_agent.rollout.thread import RuntimeThread

    return RuntimeThread(partial(build_runtime, config, folder, start_over=start_over, served=served))


def open_virtual_runtime(config: RunConfig, folder: Path, clock: VirtualClock, *, start_over: bool) -> RuntimeInline:
    """The runtime in the trainer's own thread, on the time of `clock`."""
    return RuntimeInline(partial(build_runtime, config, folder, start_over=start_over, virtual=clock), clock)


def _build_in_process(config: RunConfig, folder: Path, *, start_over: bool, served: Served | None) -> Runtime:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # the trainer's process has the display
    torch.set_num_threads(config.engine.threads)
    return build_runtime(config, folder, start_over=start_over, served=served)


def build_runtime(
    config: RunConfig,
    folder: Path,
    *,
    start_over: bool,
    served: Served | None = None,
    virtual: VirtualClock | None = None,
) -> Runtime:
    """`start_over`: the folder holds lines of a run that was killed before its first checkpoint."""
    from pace_agent.trainers.advantages import group_advantages

    parts, ledger, clock = wire(config), Ledger(), virtual or WallClock()
    engine = make_engine(config, parts.model, parts.limits, served, process=False, clock=virtual)
    start, most = _concurrency(config)
    runtime: Runtime = Runtime(
        player=parts.player(
            engine,
            parts.limits,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            clock=clock,
            tool_seconds=None if virtual is None else costs_of(config).tool_call,
            version=lambda: runtime.version,
        ),
        engine=engine,
        queue=TaskQueue(parts.source, seed=config.run.seed, max_attempts=config.rollout.max_attempts),
        pool=PacePool[Sample](pool_options(config), ledger),
        ledger=ledger,
        journal=Journal(folder / "trajectories.jsonl"),
        ledger_log=Journal(folder / "ledger.jsonl"),
        advantages=group_advantages,
        options=RuntimeOptions(
            group_size=config.rollout.group_size,
            concurrency=start,
            most_concurrency=most,
            seed=config.run.seed,
            requeue=config.rollout.requeue,
            max_failure_share=config.rollout.max_failure_share,
        ),
        clock=clock,
        resources=() if parts.provider is None else (parts.provider,),
        before_step=_making_room(engine) if config.sglang.colocate else None,
    )
    if start_over:
        runtime.start_over()
    return runtime


def _concurrency(config: RunConfig) -> tuple[int, int | None]:
    """Where it starts, and up to where it may be moved; `auto` starts with one batch in flight."""
    given = config.rollout.concurrency
    if given != "auto":
        return given, None
    most = max(config.engine.slots, config.rollout.group_size)
    return min(config.pool.batch_size, most), most


def _making_room(engine: Engine) -> Callable[[], Awaitable[None]] | None:
    """What an engine on the trainer's GPU does before a step."""
    from pace_agent.engine.sglang.engine import SGLangEngine

    return engine.release_memory if isinstance(engine, SGLangEngine) else None


def pool_options(config: RunConfig) -> PoolOptions:
    """The pool's section, in units."""
    section = config.pool
    size = config.rollout.group_size if section.unit == "group" else 1
    return PoolOptions(
        **{name: getattr(section, name) for name in POOL_SETTINGS},
        batch_size=section.batch_size // size,
        group_size=config.rollout.group_size,
        target=None if section.target is None else section.target // size,
        capacity=None if section.capacity is None else section.capacity // size,
    )


async def evaluate_held(runtime: Runtime, plan: EvalPlan, *, temperature: float) -> EvalResult:
    """Held-out tasks under the published weights; no new rollout starts meanwhile."""
    runtime.hold(True)
    try:
        return await evaluate(replace(runtime.player, temperature=temperature), runtime.queue.source, plan)
    finally:
        runtime.hold(False)


async def end(runtime: Runtime) -> RunEnd:
    """Close the runtime, and tell what came out."""
    await handle.end(runtime)
    ledger = runtime.ledger
    return RunEnd(
        pool=runtime.pool.summary(),
        ledger=ledger.counts(),
        reasons=ledger.reasons(),
        policy_version=runtime.version,
        interrupted_total=runtime.window.interrupted_total,
        incarnation=ledger.incarnation,
    )
