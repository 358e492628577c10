"""One rollout: how it ends, what it keeps, and that its environment is closed once."""

import asyncio
from typing import Any

import gymnasium
import pytest
from parts import CharChat, CountingEnv, parse, say

from pace_agent.engine.base import GenerationRequest
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.rollout.adapter import as_async
from pace_agent.rollout.episode import Episode, Player
from pace_agent.rollout.limits import Limits
from pace_agent.types import Message, StopReason, Task, ToolCall, Trajectory

LIMITS = Limits(turns=5, turn_tokens=20, context=400)


def player(env: Any, reply: Any = lambda request: say("hello"), *, limits: Limits = LIMITS, **settings: Any) -> Player:
    engine = settings.pop("engine", None) or ScriptedEngine(reply)
    return Player(
        env_id="test/Env-v0",
        make_env=lambda: env,
        engine=engine,
        chat=settings.pop("chat", CharChat()),
        parse=settings.pop("parse", parse),
        limits=limits,
        **settings,
    )


def episode(**changes: Any) -> Episode:
    return Episode(**{"id": 7, "group_id": 2, "task": Task("t", "question"), "sampling_seed": 5, **changes})


async def play(env: Any, *args: Any, **settings: Any) -> Trajectory:
    made = player(env, *args, **settings)
    await made.engine.start()
    return await made.play(episode())


async def test_a_rollout_keeps_the_sampled_ids_and_masks_the_rest() -> None:
    env = CountingEnv(rounds=2)
    trajectory = await play(env)
    assert trajectory.stop is StopReason.TERMINATED
    assert trajectory.reward == 1.0
    assert env.closed == 1
    chat = CharChat()
    first = chat.prompt_ids([Message("user", "question")])
    second = chat.suffix_ids([Message("user", "again")], last_output=say("hello"))
    assert trajectory.ids() == first + say("hello") + second + say("hello")
    assert trajectory.loss_mask() == [0] * len(first) + [1] * 6 + [0] * len(second) + [1] * 6
    assert len(trajectory.ids()) == len(trajectory.rollout_logprobs()) == len(trajectory.versions())
    assert trajectory.metrics == {"rounds": 2.0}
    assert [message.content for message in trajectory.messages] == ["question", "hello", "again", "hello"]


async def test_the_engine_sees_the_whole_sequence_each_turn_and_is_told_when_it_ends() -> None:
    seen: list[list[int]] = []

    def reply(request: GenerationRequest) -> list[int]:
        seen.append(list(request.input_ids))
        return say("x")

    made = player(CountingEnv(rounds=3), reply)
    await made.engine.start()
    trajectory = await made.play(episode())
    assert len(seen) == 3
    assert seen[1][: len(seen[0]) + 2] == seen[0] + say("x")
    assert trajectory.ids() == seen[2] + say("x")
    assert made.engine.released == ["2-7"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(turns=1, turn_tokens=20), StopReason.TRUNCATED_TURNS),
        (Limits(turns=9, turn_tokens=3), StopReason.TRUNCATED_TOKENS),
        (Limits(turns=9, tokens=8), StopReason.TRUNCATED_TOKENS),
        (Limits(turns=9, turn_tokens=20, context=16), StopReason.TRUNCATED_CONTEXT),
        (Limits(turns=9, turn_tokens=20, context=24), StopReason.TRUNCATED_CONTEXT),
    ],
)
async def test_every_limit_has_its_own_reason_and_is_kept_exactly(limits: Limits, stop: StopReason) -> None:
    env = CountingEnv(rounds=9)
    trajectory = await play(env, limits=limits)
    assert trajectory.stop is stop
    assert trajectory.reward == 0.0
    assert env.closed == 1
    assert limits.context is None or len(trajectory.ids()) <= limits.context
    assert limits.tokens is None or trajectory.n_sampled <= limits.tokens


async def test_environment_text_that_outgrows_the_context_is_not_added() -> None:
    """A budget of 20, 15 used, a result of 10: truncated, with at most 20 ids and aligned lists."""
    trajectory = await play(CountingEnv(rounds=9), limits=Limits(turns=9, turn_tokens=20, context=24))
    assert trajectory.stop is StopReason.TRUNCATED_CONTEXT
    assert len(trajectory.turns) == 1
    assert len(trajectory.ids()) == len(trajectory.loss_mask()) <= 24


async def test_a_turn_cut_off_by_length_is_not_executed() -> None:
    env = CountingEnv()
    trajectory = await play(env, lambda request: list(map(ord, "x" * 50)), limits=Limits(turns=3, turn_tokens=10))
    assert trajectory.stop is StopReason.TRUNCATED_TOKENS
    assert env.answers == []


async def test_a_limit_of_zero_tool_calls_allows_none() -> None:
    env = CountingEnv()
    trajectory = await play(
        env,
        parse=lambda text: Message("assistant", text, (ToolCall("f"),)),
        limits=Limits(turns=3, turn_tokens=20, tool_calls=0),
    )
    assert trajectory.stop is StopReason.TRUNCATED_TOOL_CALLS
    assert env.answers == []


async def test_time_is_a_limit_too() -> None:
    env = CountingEnv(delay=30.0)
    trajectory = await play(env, limits=Limits(turns=3, turn_tokens=20, seconds=0.05))
    assert trajectory.stop is StopReason.TRUNCATED_TIME
    assert env.closed == 1


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "high"])
async def test_a_reward_that_is_no_finite_number_fails_the_rollout(reward: object) -> None:
    trajectory = await play(CountingEnv(rewards=lambda env: reward))
    assert trajectory.stop is StopReason.FAILED_GRADER
    assert trajectory.reward is None
    assert "reward" in (trajectory.error or "")


async def test_an_environment_that_raises_fails_its_own_rollout() -> None:
    env = CountingEnv(fail_at=1)
    trajectory = await play(env)
    assert trajectory.stop is StopReason.FAILED_ENVIRONMENT
    assert "broken on purpose" in (trajectory.error or "")
    assert env.closed == 1


async def test_a_timeout_of_the_environment_is_its_own_fault() -> None:
    def late(env: CountingEnv) -> float:
        raise TimeoutError("my server")

    trajectory = await play(CountingEnv(rewards=late))
    assert trajectory.stop is StopReason.FAILED_ENVIRONMENT


async def test_an_engine_that_fails_is_named() -> None:
    env = CountingEnv()
    engine = ScriptedEngine(lambda request: say("x"), fail=lambda request: "no memory")
    trajectory = await play(env, engine=engine)
    assert trajectory.stop is StopReason.FAILED_ENGINE
    assert env.closed == 1


async def test_no_sampled_token_is_a_failure_not_a_score() -> None:
    trajectory = await play(CountingEnv(), limits=Limits(turns=3, turn_tokens=20, context=4))
    assert trajectory.stop is StopReason.FAILED_EMPTY
    assert trajectory.reward is None


async def test_cancellation_closes_the_environment_once_and_rises() -> None:
    env = CountingEnv(delay=30.0)
    made = player(env)
    await made.engine.start()
    task = asyncio.create_task(made.play(episode()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1
    assert made.engine.released == ["2-7"]  # type: ignore[attr-defined]


async def test_an_interrupted_turn_has_a_span_for_every_version() -> None:
    engine = ScriptedEngine(lambda request: say("x" * 10), token_seconds=0.02)
    made = player(CountingEnv(rounds=1), engine=engine, version=lambda: engine.version)
    await engine.start()
    task = asyncio.create_task(made.play(episode()))
    await asyncio.sleep(0.07)
    await engine.pause()
    await engine.update_weights({}, 1)
    await engine.resume()
    trajectory = await task
    (turn,) = trajectory.turns
    assert [span.version for span in turn.spans] == [0, 1]
    assert turn.segments == 2
    assert trajectory.interrupted == 1
    assert trajectory.multi_version
    assert trajectory.completed_version == 1


class TextEnv(gymnasium.Env[str, str]):
    """A plain Gymnasium environment: guess the number that the seed hides."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)
    closes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden = int(self.np_random.integers(10))
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == str(self.hidden)
        return ("Right" if right else "No"), float(right), right, False, {}

    def close(self) -> None:
        type(self).closes += 1


async def test_a_plain_gymnasium_environment_plays_too() -> None:
    made = player(as_async(TextEnv()), lambda request: say("4"), limits=Limits(turns=3, turn_tokens=9))
    await made.engine.start()
    trajectory = await made.play(episode(task=Task("s", "", seed=3)))
    assert trajectory.messages[0] == Message("user", "Guess.")
    assert trajectory.stop in (StopReason.TERMINATED, StopReason.TRUNCATED_TURNS)
    assert TextEnv.closes == 1
