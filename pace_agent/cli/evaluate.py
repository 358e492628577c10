"""`pace-agent eval`: held-out tasks, n rollouts each, by the same episodes as training."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pace_agent.cli.serving import engine_for
from pace_agent.cli.wiring import Parts, wire
from pace_agent.config import RunConfig
from pace_agent.evaluation.metrics import EvalResult, EvalSample, format_table, summarise
from pace_agent.evaluation.runner import EvalPlan, play_tasks, sampling_seed
from pace_agent.rollout.episode import Player
from pace_agent.tasks import TaskSource
from pace_agent.types import Trajectory


def run(target: str, config: RunConfig, *, n: int, tasks: int, seed: int, temperature: float, as_json: bool) -> None:
    """Evaluate and print. Nothing is written into the run folder."""
    parts = wire(with_model(config, target))
    plan = EvalPlan(tasks=tasks, n=n, seed=seed, concurrency=config.engine.slots)
    result = asyncio.run(_evaluate(parts, config, plan, temperature))
    if as_json:
        print(json.dumps({"model": str(Path(parts.model)), **result.to_dict()}, allow_nan=False))
    else:
        print(f"model {parts.model}")
        print(format_table(result))


def with_model(config: RunConfig, target: str) -> RunConfig:
    """The config with the model that `target` names: a run's own config names the model it started from."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": target})})


async def _evaluate(parts: Parts, config: RunConfig, plan: EvalPlan, temperature: float) -> EvalResult:
    bar = Progress(
        TextColumn("Evaluating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    try:
        async with engine_for(config, parts, process=config.engine.process) as (engine, limits):
            if not bar.disable:
                bar.start()
            shown = bar.add_task("", total=len(plan.chosen(parts.source)) * plan.n)
            player = parts.player(engine, limits, temperature=temperature)
            return await evaluate(player, parts.source, plan, on_done=lambda _: bar.advance(shown))
    finally:
        bar.stop()
        if parts.provider is not None:
            await parts.provider.aclose()


async def evaluate(
    player: Player, source: TaskSource, plan: EvalPlan, *, on_done: Callable[[Trajectory], None] | None = None
) -> EvalResult:
    """The figures of `plan`, on the player's engine, which is started."""
    trajectories = await play_tasks(player, source, plan, on_done=on_done)
    samples = [
        EvalSample.of(each, number=each.attempt, seed=sampling_seed(plan, each.group_id, each.attempt))
        for each in trajectories
    ]
    return summarise(samples, env_id=player.env_id, n=plan.n)
