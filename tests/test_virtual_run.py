"""Runs on virtual time: what they cost, and that a seed fixes them."""

import asyncio
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from parts import CharChat, CountingEnv, NumberTasks, say
from tiny_models import make_model

from pace_agent import cli
from pace_agent.clock import VirtualClock
from pace_agent.costs import Costs
from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.engine.local.inprocess import LocalEngine
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.errors import RunError
from pace_agent.ledger import Ledger, State
from pace_agent.pool import PacePool, PoolOptions
from pace_agent.report.metrics import read_metrics
from pace_agent.rollout.episode import Player
from pace_agent.rollout.inline import RuntimeInline
from pace_agent.rollout.journal import Journal
from pace_agent.rollout.limits import Limits
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.tasks import TaskQueue
from pace_agent.types import Batch, Message, Sample, ToolCall

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def parse(text: str) -> Message:
    """Every turn is text and calls one tool."""
    return Message("assistant", text, tool_calls=(ToolCall(name="look", arguments={}),))


def even(request: GenerationRequest) -> list[int]:
    """Ten tokens."""
    return say("x" * 9)


def uneven(request: GenerationRequest) -> list[int]:
    """Ten tokens on average, by the group."""
    return say("x" * (random.Random(request.session.split("-")[0]).randint(5, 15) - 1))


class Run:
    """Scripted rollouts of one turn, a tenth of a second for a token, so about one second each; batches of eight."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: str = "pace",
        concurrency: int = 16,
        most_concurrency: int | None = None,
        reply: Callable[[GenerationRequest], Sequence[int]] = even,
        tool_seconds: Callable[[int, int], float] | None = None,
    ) -> None:
        self.clock, self.ledger = VirtualClock(), Ledger()
        self.waits: list[float] = []
        self.batches: list[Batch] = []
        made = iter(range(1 << 20))

        def make_env() -> CountingEnv:
            reward = float(next(made) % 2)
            return CountingEnv(rounds=1, rewards=reward)

        def build() -> Runtime:
            engine = ScriptedEngine(reply, token_seconds=0.1, clock=self.clock)
            runtime: Runtime = Runtime(
                player=Player(
                    env_id="test/Env-v0",
                    make_env=make_env,
                    engine=engine,
                    chat=CharChat(),
                    parse=parse,
                    limits=Limits(turns=5, turn_tokens=50),
                    clock=self.clock,
                    tool_seconds=tool_seconds,
                    version=lambda: runtime.version,
                ),
                engine=engine,
                queue=TaskQueue(NumberTasks(), seed=1),
                pool=PacePool[Sample](PoolOptions(policy=policy, batch_size=8, group_size=4), self.ledger),
                ledger=self.ledger,
                journal=Journal(folder / "trajectories.jsonl"),
                ledger_log=Journal(folder / "ledger.jsonl"),
                advantages=lambda rewards: [value - sum(rewards) / len(rewards) for value in rewards],
                options=RuntimeOptions(group_size=4, concurrency=concurrency, most_concurrency=most_concurrency),
                clock=self.clock,
            )
            return runtime

        self.runtime = RuntimeInline(build, self.clock)

    def train(self, steps: int, *, step_seconds: float) -> None:
        """As a trainer does it."""
        self.runtime.start()
        self.runtime.begin()
        for _ in range(steps):
            began = self.clock.now()
            batch = self.runtime.next_batch()
            assert batch is not None
            self.waits.append(self.clock.now() - began)
            self.batches.append(batch)
            self.runtime.spend(step_seconds)
            self.runtime.step_ended({})
        self.seconds = self.clock.now()
        self.runtime.close()

    def staleness(self, of: str) -> float:
        return sum(batch.metrics[f"staleness/{of}_mean"] for batch in self.batches[4:]) / len(self.batches[4:])


def test_production_and_consumption_are_as_the_costs_say(tmp_path: Path) -> None:
    """Sixteen rollouts of one second, and batches of eight in 0.75 seconds: one and a half times what is trained."""
    run = Run(tmp_path, reply=uneven)
    run.train(40, step_seconds=0.75)
    completed = run.ledger.count(State.TRAINED) + run.ledger.count(State.REJECTED) + run.ledger.count(State.POOLED)
    assert run.ledger.count(State.TRAINED) == 320
    assert completed / 320 == pytest.approx(1.5, rel=0.05)
    assert run.seconds == pytest.approx(40 * 0.75, rel=0.05)
    assert sum(run.waits) < 0.05 * run.seconds
    assert run.staleness("generation") > 0.1
    assert run.staleness("effective") > run.staleness("generation")


def test_where_consumption_is_faster_the_trainer_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, reply=uneven)
    run.train(40, step_seconds=0.25)
    assert run.ledger.count(State.REJECTED) < 0.1 * run.ledger.count(State.TRAINED)
    assert run.seconds == pytest.approx(40 * 8 / 16, rel=0.1)
    assert sum(run.waits) == pytest.approx(run.seconds - 40 * 0.25)


def test_auto_concurrency_follows_the_trainer(tmp_path: Path) -> None:
    """A trainer that takes eight in 0.75 seconds needs 10.7 rollouts in flight; 32 would be three times too many."""
    fixed = Run(tmp_path / "fixed", reply=uneven, concurrency=32)
    auto = Run(tmp_path / "auto", reply=uneven, concurrency=32, most_concurrency=32)
    for run in (fixed, auto):
        run.train(80, step_seconds=0.75)
    assert auto.batches[-1].metrics["rollout/concurrency"] < 20
    assert fixed.batches[-1].metrics["rollout/concurrency"] == 32
    assert sum(auto.waits[40:]) < 0.1 * 40 * 0.75
    assert auto.ledger.count(State.REJECTED) < 0.5 * fixed.ledger.count(State.REJECTED)


def test_sync_takes_turns(tmp_path: Path) -> None:
    run = Run(tmp_path, policy="sync")
    run.train(10, step_seconds=0.75)
    assert run.seconds == pytest.approx(10 * 1.75)
    assert run.waits == pytest.approx([1.0] * 10)
    assert run.staleness("effective") == 0.0


def test_a_tool_call_is_felt(tmp_path: Path) -> None:
    run = Run(tmp_path, policy="sync", tool_seconds=Costs(tool_seconds=2.5).tool_call)
    run.train(4, step_seconds=0.75)
    assert run.seconds == pytest.approx(4 * (1.0 + 2.5 + 0.75))
    trajectory = run.batches[0].samples[0].trajectory
    assert trajectory.turns[0].generate_seconds == pytest.approx(1.0)
    assert trajectory.turns[0].env_seconds == pytest.approx(2.5)


def test_nothing_that_the_machine_measured_is_in_a_batch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2, step_seconds=0.75)
    assert "pool/occupancy" in run.batches[0].metrics
    assert "pool/draw_seconds" not in run.batches[0].metrics


def test_a_run_that_can_never_go_on_says_so_and_closes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.runtime.start()
    with pytest.raises(RunError, match="nothing can happen"):
        run.runtime.next_batch()  # before `begin`: no rollout was started
    run.runtime.close()
    run.runtime.close()
    with pytest.raises(RunError, match="closed"):
        run.runtime.next_batch()


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.runtime.start()
    run.runtime.begin()
    run.clock.loop.call_later(0.5, run.runtime.stop)
    assert run.runtime.next_batch() is None
    assert run.clock.now() == pytest.approx(0.5)
    run.runtime.close()


# ---- the engine ---------------------------------------------------------------------------------------------------

COSTS = Costs(decode_curve=((1, 1.0), (2, 1.5)), prefill_token_seconds=0.01, update_seconds=7.0)


def engine_seconds(work: Callable[[LocalEngine, VirtualClock], object]) -> float:
    """Virtual seconds of `work` on a random model that costs COSTS."""
    clock = VirtualClock()

    async def measure() -> float:
        engine = LocalEngine(make_model(), clock=clock, costs=COSTS)
        await engine.start()
        began = clock.now()
        await work(engine, clock)  # type: ignore[misc]
        seconds = clock.now() - began
        await engine.aclose()
        return seconds

    try:
        return clock.loop.run_until_complete(measure())
    finally:
        clock.loop.close()


def ask(name: str, prompt: int, tokens: int) -> GenerationRequest:
    start = int(name) * 7
    ids = [(start + 3 * i) % 96 for i in range(prompt)]
    return GenerationRequest(name, ids, SamplingParams(max_new_tokens=tokens, seed=1))


def test_a_decode_step_and_a_prefill_take_what_they_cost() -> None:
    async def one(engine: LocalEngine, clock: VirtualClock) -> None:
        await engine.generate(ask("1", 20, 5))

    async def two(engine: LocalEngine, clock: VirtualClock) -> None:
        await asyncio.gather(engine.generate(ask("1", 20, 5)), engine.generate(ask("2", 10, 5)))

    assert engine_seconds(one) == pytest.approx(5 * 1.0 + 20 * 0.01)
    assert engine_seconds(two) == pytest.approx(5 * 1.5 + 30 * 0.01)


def test_an_update_waits_for_the_step_takes_its_time_and_parts_the_versions() -> None:
    got: list[Generation] = []

    async def interrupted(engine: LocalEngine, clock: VirtualClock) -> None:
        task = asyncio.ensure_future(engine.generate(ask("1", 20, 5)))
        await clock.sleep(2.5)  # in the middle of the third step
        await engine.pause()
        assert clock.now() == pytest.approx(3.2)
        await engine.update_weights(make_model(seed=1).state_dict(), 1)
        await engine.resume()
        got.append(await task)
        stats = engine.stats()
        assert stats.update_seconds == pytest.approx(7.0)
        assert stats.paused_seconds == pytest.approx(7.7)

    seconds = engine_seconds(interrupted)
    assert [(span.version, span.end) for span in got[0].spans] == [(0, 3), (1, 5)]
    assert seconds == pytest.approx(5 * 1.0 + 20 * 0.01 + 7.0 + 23 * 0.01)  # the kept prefix is computed again


# ---- the whole job ------------------------------------------------------------------------------------------------

SMALL = [
    *("--pool.batch_size", "16", "--rollout.group_size", "4", "--rollout.concurrency", "16", "--clock", "virtual"),
    *("--run.checkpoint_every", "2", "--trainer.per_device_train_batch_size", "8", "--trainer.max_steps", "3"),
]
FILES = ("final/model.safetensors", "ledger.jsonl", "metrics.jsonl", "trajectories.jsonl", "summary.json")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Training sets torch's threads for the whole process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def main(*arguments: str) -> int:
    """The exit code of a command."""
    try:
        return cli.main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def train(folder: Path, *options: str) -> Path:
    assert main("train", "--run-dir", str(folder), *SMALL, *options) == 0
    return folder


def hashes(run: Path) -> dict[str, str]:
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in FILES}


def test_a_seed_fixes_the_whole_run(tmp_path: Path) -> None:
    tools = ["--clock.tool_seconds", "0.05", "--clock.tool_sigma", "1"]
    one, other = train(tmp_path / "one", *tools), train(tmp_path / "other", *tools)
    assert hashes(one) == hashes(other)
    third = hashes(train(tmp_path / "third", *tools, "--seed", "1"))
    assert not set(third.values()) & set(hashes(one).values())
    rows = read_metrics(one / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["tool/price/seconds"] for row in rows) > 0.05
    between = rows[2]["run/seconds"] - rows[1]["run/seconds"]
    parts = sum(rows[2][f"trainer/{name}_seconds"] for name in ("wait", "step", "publish"))
    assert between == pytest.approx(parts)
    assert rows[2]["trainer/publish_seconds"] >= 0.02


@pytest.mark.parametrize("policy", ["sync", "max_staleness"])
def test_a_baseline_runs_on_virtual_time(tmp_path: Path, policy: str) -> None:
    run = train(tmp_path / "run", "--pool.policy", policy, "--clock.step_seconds", "3")
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["trainer/step_seconds"] for row in rows] == pytest.approx([3.0] * 3)
    waited = [row["trainer/wait_seconds"] > 0 for row in rows]
    assert waited == ([True] * 3 if policy == "sync" else [True, False, False])
    assert (rows[2]["staleness/effective_mean"] == 0) == (policy == "sync")


def test_two_runs_resumed_from_one_checkpoint_are_the_same(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "checkpoint-3", ignore_errors=True)
    found = []
    for name in ("one", "other"):
        shutil.copytree(run, tmp_path / name)
        assert main("train", "--resume", str(tmp_path / name), "--trainer.max_steps", "4") == 0
        found.append(hashes(tmp_path / name))
    assert found[0] == found[1]


def test_an_environment_with_a_sandbox_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--run-dir", str(tmp_path / "run"), "--clock", "virtual", "--env", "pace/MathPython-v0"]
    assert main("train", *options) == 2
    assert "clock.kind" in capsys.readouterr().err
