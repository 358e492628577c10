"""Plays held-out tasks, `n` rollouts each, with the same episodes as training."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pace_agent.rollout.episode import Episode, Player
from pace_agent.rollout.runtime import derive_seed
from pace_agent.tasks import TaskSource
from pace_agent.types import Split, Task, Trajectory


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """`tasks` tasks of `split` from the first one on, `n` rollouts each; `seed` fixes the sampling of every one."""

    tasks: int
    n: int = 1
    seed: int = 0
    split: Split = "eval"
    concurrency: int = 128

    def chosen(self, source: TaskSource) -> list[Task]:
        """The tasks; fewer where the split holds fewer."""
        size = source.size(self.split)
        return [
            source.task(self.split, index) for index in range(self.tasks if size is None else min(self.tasks, size))
        ]


def sampling_seed(plan: EvalPlan, place: int, sample: int) -> int:
    """The seed of one rollout: another one for every sample, the same one in every evaluation of the plan's seed."""
    return derive_seed(plan.seed, plan.split, place, sample)


async def play_tasks(
    player: Player,
    source: TaskSource,
    plan: EvalPlan,
    *,
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """All rollouts of `plan`, ordered by task and sample. The group id is the task's place, the attempt the sample's.

    A rollout that fails stays in the list with its reason: nothing is dropped, and the caller counts it.
    """
    room = asyncio.Semaphore(plan.concurrency)
    tasks = plan.chosen(source)

    async def one(place: int, task: Task, sample: int) -> Trajectory:
        async with room:
            trajectory = await player.play(
                Episode(
                    id=place * plan.n + sample,
                    group_id=place,
                    task=task,
                    attempt=sample,
                    env_seed=task.seed or derive_seed(plan.seed, "environment", place),
                    sampling_seed=sampling_seed(plan, place, sample),
                )
            )
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as group:
        jobs = [
            group.create_task(one(place, task, sample)) for place, task in enumerate(tasks) for sample in range(plan.n)
        ]
    return [job.result() for job in jobs]
