"""The asynchronous loop around a scripted engine: groups, failures, requeue, checkpoint, and the ledger's law."""

import asyncio
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from parts import CharChat, CountingEnv, NumberTasks, parse, say

from pace_agent.engine.base import GenerationRequest
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.errors import RunError
from pace_agent.ledger import Ledger, State
from pace_agent.pool import PacePool, PoolOptions
from pace_agent.rollout.episode import Player
from pace_agent.rollout.journal import Journal, read_lines
from pace_agent.rollout.limits import Limits
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.rollout.thread import RuntimeThread
from pace_agent.tasks import TaskQueue
from pace_agent.types import Batch, Sample

POLICIES = ["pace", "sync", "unfiltered", "max_staleness", "bounded_admission", "drop_oldest"]


class Made:
    """A runtime and everything that a test wants to look at."""

    def __init__(
        self,
        folder: Path,
        *,
        reward: Callable[[CountingEnv], Any] = lambda env: float(len(env.answers[0]) % 2),
        reply: Callable[[GenerationRequest], Sequence[int]] = lambda r: say("x" * (1 + int(r.rid.split("-")[1]) % 4)),
        rounds: int = 2,
        delay: float = 0.0,
        fail_at: Callable[[int], int | None] = lambda number: None,
        tasks: int | None = None,
        max_attempts: int = 3,
        max_failure_share: float = 0.9,
        requeue: bool = True,
        token_seconds: float = 0.0,
        concurrency: int = 32,
        **pool: Any,
    ) -> None:
        self.envs: list[CountingEnv] = []

        def make_env() -> CountingEnv:
            env = CountingEnv(rounds=rounds, rewards=reward, delay=delay, fail_at=fail_at(len(self.envs)))
            self.envs.append(env)
            return env

        self.engine = ScriptedEngine(reply, token_seconds=token_seconds)
        self.ledger = Ledger()
        options = PoolOptions(**{"batch_size": 8, "group_size": 4, **pool})
        self.runtime = Runtime(
            player=Player(
                env_id="test/Env-v0",
                make_env=make_env,
                engine=self.engine,
                chat=CharChat(),
                parse=parse,
                limits=Limits(turns=5, turn_tokens=50),
                version=lambda: self.runtime.version,
            ),
            engine=self.engine,
            queue=TaskQueue(NumberTasks(tasks), seed=1, max_attempts=max_attempts),
            pool=PacePool[Sample](options, self.ledger),
            ledger=self.ledger,
            journal=Journal(folder / "trajectories.jsonl"),
            ledger_log=Journal(folder / "ledger.jsonl"),
            advantages=lambda rewards: [value - sum(rewards) / len(rewards) for value in rewards],
            options=RuntimeOptions(
                group_size=4, concurrency=concurrency, requeue=requeue, max_failure_share=max_failure_share
            ),
        )

    async def train(self, steps: int) -> list[Batch]:
        """Take `steps` batches, each one published."""
        batches = []
        for _ in range(steps):
            async with asyncio.timeout(20):
                batch = await self.runtime.next_batch()
            assert batch is not None
            batches.append(batch)
            await self.runtime.step_ended({})
            self.ledger.audit()
        return batches


async def begin(made: Made) -> "asyncio.Task[None]":
    await made.runtime.start()
    return asyncio.create_task(made.runtime.run())


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_trains_and_loses_nothing(tmp_path: Path, policy: str) -> None:
    made = Made(tmp_path, policy=policy)
    loop = await begin(made)
    batches = await made.train(12)
    await made.runtime.aclose()
    await loop
    assert [batch.step for batch in batches] == list(range(1, 13))
    assert [batch.version for batch in batches] == list(range(12))
    assert all(len(batch.samples) == 8 for batch in batches)
    trained = [sample.trajectory.id for batch in batches for sample in batch.samples]
    assert len(set(trained)) == len(trained) == made.ledger.count(State.TRAINED) == 96
    assert all(env.closed == 1 for env in made.envs)
    assert made.ledger.count(State.RUNNING) == made.ledger.count(State.DRAWN) == 0
    made.ledger.audit()


async def test_the_journal_tells_the_fate_of_every_completed_rollout_once(tmp_path: Path) -> None:
    made = Made(tmp_path, policy="pace")
    loop = await begin(made)
    await made.train(6)
    await made.runtime.aclose()
    await loop
    lines = list(read_lines(tmp_path / "trajectories.jsonl"))
    assert len({line["id"] for line in lines}) == len(lines)
    fates: dict[str, int] = {}
    for line in lines:
        fates[line["fate"]] = fates.get(line["fate"], 0) + 1
    counts = made.ledger.counts()
    for state in ("trained", "rejected", "pooled", "grouping"):
        assert fates.get(state, 0) == counts[state], state
    one = next(line for line in lines if line["fate"] == "trained")
    assert one["messages"][0]["role"] == "user"
    assert one["turns"][0]["stamps"]
    last = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()][-1]
    assert {name: last[name] for name in counts} == counts


async def test_a_group_with_equal_rewards_carries_no_signal_and_is_refilled(tmp_path: Path) -> None:
    """Under `sync`, where only a batch may start, dropped groups must be replaced or the run would stand still."""
    made = Made(
        tmp_path,
        policy="sync",
        reward=lambda env: float(env.task is not None and env.task.answer % 2) * (len(env.answers[0]) % 2),
    )
    loop = await begin(made)
    batches = await made.train(3)
    await made.runtime.aclose()
    await loop
    assert made.ledger.count(State.REJECTED, "no_signal") > 0
    assert all(sample.advantage != 0 for batch in batches for sample in batch.samples)


async def test_an_infrastructure_failure_is_tried_again_and_never_a_reward(tmp_path: Path) -> None:
    made = Made(tmp_path, fail_at=lambda number: 1 if number % 5 == 0 else None)
    loop = await begin(made)
    batches = await made.train(8)
    await made.runtime.aclose()
    await loop
    assert made.ledger.count(State.FAILED, "failed.environment") > 0
    assert all(sample.trajectory.stop.completed for batch in batches for sample in batch.samples)
    assert any(sample.trajectory.attempt > 0 for batch in batches for sample in batch.samples)


async def test_a_group_goes_on_without_a_member_that_can_not_be_had(tmp_path: Path) -> None:
    """One of four always fails: the group is used with three, and advantages are over those three."""

    def reward(env: CountingEnv) -> float | None:
        return float(len(env.answers[0]) % 2) if len(env.answers[0]) != 4 else None

    made = Made(tmp_path, reward=reward, max_attempts=1)
    loop = await begin(made)
    batches = await made.train(4)
    await made.runtime.aclose()
    await loop
    assert made.ledger.count(State.FAILED, "failed.grader") > 0
    groups: dict[int, list[float]] = {}
    for batch in batches:
        for sample in batch.samples:
            groups.setdefault(sample.trajectory.group_id, []).append(sample.advantage)
    whole = [advantages for advantages in groups.values() if len(advantages) == 3]
    assert whole
    assert all(sum(advantages) == pytest.approx(0) for advantages in whole)


async def test_too_many_failures_stop_the_run_and_say_why(tmp_path: Path) -> None:
    made = Made(tmp_path, fail_at=lambda number: 1, max_failure_share=0.5)
    loop = await begin(made)
    with pytest.raises(RunError, match=r"(?s)max_failure_share.*failed\.environment.*broken on purpose"):
        await made.train(1)
    await made.runtime.aclose()
    await loop
    assert all(env.closed == 1 for env in made.envs)


async def test_rollouts_go_on_over_a_weight_update(tmp_path: Path) -> None:
    made = Made(tmp_path, token_seconds=0.004, policy="unfiltered")
    loop = await begin(made)
    batches = await made.train(10)
    await made.runtime.aclose()
    await loop
    trajectories = [sample.trajectory for batch in batches for sample in batch.samples]
    assert any(trajectory.multi_version for trajectory in trajectories)
    for trajectory in trajectories:
        versions = trajectory.sampled_versions().tolist()
        assert versions == sorted(versions)
        assert versions[-1] <= trajectory.completed_version


async def test_a_checkpoint_resumes_without_training_anything_twice(tmp_path: Path) -> None:
    """Twelve tasks, killed with rollouts in flight and in the pool: what was trained before is not trained again."""
    made = Made(tmp_path, tasks=12, policy="unfiltered", delay=0.003)
    loop = await begin(made)
    before = await made.train(3)
    state = pickle.loads(pickle.dumps(made.runtime.state_dict()))
    lost = await made.train(2)
    await made.runtime.aclose()
    await loop

    again = Made(tmp_path, tasks=12, policy="unfiltered", delay=0.003)
    again.runtime.load_state_dict(state)
    assert again.runtime.version == 3
    assert again.ledger.incarnation == 1
    loop = await begin(again)
    after = await again.train(4)
    await again.runtime.aclose()
    await loop
    assert [batch.version for batch in after] == [3, 4, 5, 6]
    lines = list(read_lines(tmp_path / "trajectories.jsonl"))
    trained = [line["id"] for line in lines if line["fate"] == "trained"]
    assert len(trained) == len(set(trained)) == again.ledger.count(State.TRAINED) == 56
    assert {s.trajectory.id for batch in before for s in batch.samples} <= set(trained)
    assert (tmp_path / "rolled_back" / "trajectories.1.jsonl").exists()
    assert lost
    again.ledger.audit()


async def test_a_run_killed_before_its_first_checkpoint_starts_over_and_keeps_the_old_lines(tmp_path: Path) -> None:
    for killed in range(3):
        made = Made(tmp_path)
        if killed:
            made.runtime.start_over()
        assert made.ledger.incarnation == killed
        loop = await begin(made)
        await made.train(2)
        await made.runtime.aclose()
        await loop
        trained = [line["id"] for line in read_lines(tmp_path / "trajectories.jsonl") if line["fate"] == "trained"]
        assert len(set(trained)) == len(trained) == 16
    assert {path.name for path in (tmp_path / "rolled_back").iterdir()} == {
        f"{name}.{number}.jsonl" for name in ("trajectories", "ledger") for number in (1, 2)
    }


async def test_a_run_killed_before_its_first_draw_takes_a_new_number_the_next_time(tmp_path: Path) -> None:
    """The ledger's log says nothing of that incarnation; what was moved aside for it does."""
    for resumed in range(1, 4):
        (tmp_path / "trajectories.jsonl").write_text('{"id": 0}\n')
        made = Made(tmp_path)
        made.runtime.start_over()
        assert made.ledger.incarnation == resumed
        made.runtime.journal.close()
        made.runtime.ledger_log.close()


async def test_every_task_of_an_epoch_is_tried_once_before_any_comes_again(tmp_path: Path) -> None:
    made = Made(tmp_path, tasks=6, policy="unfiltered", requeue=False)
    loop = await begin(made)
    await made.train(3)
    await made.runtime.aclose()
    await loop
    lines = list(read_lines(tmp_path / "trajectories.jsonl"))
    groups = {line["group"]: line["task"] for line in lines}
    first = [groups[group] for group in sorted(groups)[:6]]
    assert len(set(first)) == len(first)


async def test_a_failed_update_leaves_the_version_and_resumes_the_engine(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.engine._fail_update = lambda version: "disk full"
    loop = await begin(made)
    assert await made.runtime.next_batch() is not None
    with pytest.raises(Exception, match="disk full"):
        await made.runtime.step_ended({})
    assert made.runtime.version == 0
    assert made.ledger.count(State.TRAINED) == 0
    await made.runtime.aclose()
    await loop
    assert made.ledger.count(State.CANCELLED, "step_dropped") == 8


async def test_stop_ends_a_wait_for_a_batch(tmp_path: Path) -> None:
    made = Made(tmp_path, delay=30.0)
    loop = await begin(made)
    waiting = asyncio.create_task(made.runtime.next_batch())
    await asyncio.sleep(0.02)
    made.runtime.stop()
    assert await waiting is None
    await made.runtime.aclose()
    await loop
    assert made.ledger.count(State.CANCELLED, "run_ended") == len(made.envs)


async def test_a_rollout_cancelled_before_its_first_step_is_counted_too(tmp_path: Path) -> None:
    made = Made(tmp_path)
    await made.runtime.start()
    made.runtime._open_group()
    await made.runtime.aclose()
    assert made.envs == []
    assert made.ledger.count(State.CANCELLED, "run_ended") == 4
    made.ledger.audit()


async def test_a_thousand_rollouts_at_once(tmp_path: Path) -> None:
    made = Made(tmp_path, concurrency=1000, batch_size=400, delay=0.01, policy="unfiltered", capacity=4000)
    loop = await begin(made)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert made.ledger.count(State.RUNNING) == 1000
    await made.train(3)
    await made.runtime.aclose()
    await loop
    assert all(env.closed == 1 for env in made.envs)


def test_the_thread_carries_calls_results_and_errors(tmp_path: Path) -> None:
    thread = RuntimeThread(lambda: Made(tmp_path).runtime)
    thread.start()
    thread.started()
    thread.begin()
    batch = thread.next_batch()
    assert batch is not None
    assert thread.step_ended({}) == 1
    assert thread.state_dict()["version"] == 1
    thread.stop()
    assert thread.next_batch() is None
    thread.close()
    thread.close()
    with pytest.raises(RunError, match="closed"):
        thread.next_batch()


def test_an_engine_that_does_not_start_is_an_error_in_the_trainer_thread(tmp_path: Path) -> None:
    def build() -> Runtime:
        raise RunError("no such model")

    thread = RuntimeThread(build)
    thread.start()
    with pytest.raises(RunError, match="no such model"):
        thread.started()
    thread.close()
