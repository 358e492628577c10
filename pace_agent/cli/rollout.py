"""`pace-agent rollout`: play one episode and print it."""

import asyncio

from rich.console import Console
from rich.text import Text

from pace_agent.cli.evaluate import with_model
from pace_agent.cli.serving import engine_for
from pace_agent.cli.wiring import Parts, wire
from pace_agent.config import RunConfig
from pace_agent.rollout.episode import Episode
from pace_agent.rollout.runtime import derive_seed
from pace_agent.types import Message, Trajectory

STYLES = {"system": "dim", "user": "bold", "assistant": "green", "tool": "yellow"}


def run(target: str, config: RunConfig, *, seed: int, temperature: float) -> None:
    """Play one held-out task and print its messages, stamps and reward; exit status 1 if the episode failed."""
    parts = wire(with_model(config, target))
    trajectory = asyncio.run(_play(parts, config, seed, temperature))
    _print(trajectory)
    if trajectory.error:
        raise SystemExit(1)


async def _play(parts: Parts, config: RunConfig, seed: int, temperature: float) -> Trajectory:
    try:
        size = parts.source.size("eval")
        task = parts.source.task("eval", seed if size is None else seed % size)
        episode = Episode(
            id=0,
            group_id=0,
            task=task,
            env_seed=task.seed or derive_seed(seed, "environment"),
            sampling_seed=derive_seed(seed, "sampling"),
        )
        async with engine_for(config, parts, process=False) as (engine, limits):
            return await parts.player(engine, limits, temperature=temperature).play(episode)
    finally:
        if parts.provider is not None:
            await parts.provider.aclose()


def _print(trajectory: Trajectory) -> None:
    console = Console(highlight=False)
    for message in trajectory.messages:
        console.print(_line(message))
    turns, sampled, total = len(trajectory.turns), trajectory.n_sampled, len(trajectory.ids())
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    console.print(f"\nreward {reward}, {trajectory.stop}, {turns} turns, {sampled} of {total} tokens sampled")
    if trajectory.error:
        console.print(Text(trajectory.error, style="red"))


def _line(message: Message) -> Text:
    name = f"{message.role} {message.name}".strip()
    return Text.assemble((f"{name:>14}  ", "cyan"), (message.content, STYLES[message.role]))
