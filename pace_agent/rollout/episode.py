"""One rollout, from a task to a trajectory.

What always holds:

* The environment is closed exactly once, however the rollout ends.
* Whatever goes wrong inside becomes the trajectory's `stop` and `error`; only cancellation rises, and a RunError, which
  says that no rollout can go on.
* The sequence never outgrows `limits.context`; environment text that would is not added.
* A turn that a length limit cut off is never executed.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pace_agent.clock import Clock, WallClock
from pace_agent.engine.base import Engine, Generation, GenerationRequest, SamplingParams
from pace_agent.errors import EngineError, EnvironmentFault, GraderError, PaceError, RunError, layer_of
from pace_agent.rollout.adapter import AsyncEnv
from pace_agent.rollout.limits import Limits
from pace_agent.types import Message, StopReason, Task, Trajectory, Turn


class Chat(Protocol):
    """Messages to ids and back; `pace_agent.chat.ChatFormat` is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]: ...

    def suffix_ids(self, messages: Sequence[Message], *, last_output: Sequence[int]) -> list[int]: ...

    def decode(self, output_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """What makes one rollout this one: all members of a group share task and `env_seed`, not `sampling_seed`."""

    id: int
    group_id: int
    task: Task
    attempt: int = 0
    env_seed: int = 0
    sampling_seed: int = 0


@dataclass(frozen=True, slots=True)
class Player:
    """What all rollouts share. `version` reads the published policy version."""

    env_id: str
    make_env: Callable[[], AsyncEnv]
    engine: Engine
    chat: Chat
    parse: Callable[[str], Message]
    limits: Limits
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    clock: Clock = field(default_factory=WallClock)
    tool_seconds: Callable[[int, int], float] | None = None
    """What a tool call costs on the clock beside what it takes, from the rollout's seed and the number of the call."""
    version: Callable[[], int] = lambda: 0

    async def play(self, episode: Episode) -> Trajectory:
        """Run one rollout to its end. Raises nothing but cancellation."""
        rollout = _Rollout(self, episode)
        started = self.clock.now()
        error: str | None = None
        try:
            try:
                async with self._time_limit():
                    stop = await rollout.run()
            except TimeoutError:
                stop = StopReason.TRUNCATED_TIME
            finally:
                await _finish(rollout.aclose())
        except RunError:
            raise  # not this rollout failed
        except Exception as exc:
            stop, error = layer_of(exc), f"{type(exc).__name__}: {exc}"
        if stop.completed and not any(turn.output_ids for turn in rollout.turns):
            stop, error = StopReason.FAILED_EMPTY, error or f"no token was sampled ({stop})"
        return Trajectory(
            id=episode.id,
            group_id=episode.group_id,
            task=episode.task,
            env_id=self.env_id,
            attempt=episode.attempt,
            turns=tuple(rollout.turns),
            messages=tuple(rollout.messages),
            stop=stop,
            reward=rollout.reward if stop.completed else None,
            completed_version=self.version(),
            metrics=rollout.metrics,
            error=error,
            started_at=started,
            completed_at=self.clock.now(),
        )

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        """TimeoutError after `limits.seconds`. Time in which the engine had nothing to sample with does not count."""
        limit, loop = self.limits.seconds, asyncio.get_running_loop()
        if limit is None:
            yield
            return
        began = loop.time() - self.engine.stats().out_seconds
        handle: asyncio.TimerHandle | None = None

        async with asyncio.timeout(None) as timeout:

            def look() -> None:
                nonlocal handle
                left = limit + self.engine.stats().out_seconds - (loop.time() - began)
                if left > 0:
                    handle = loop.call_later(left, look)
                else:
                    timeout.reschedule(loop.time())

            handle = loop.call_later(limit, look)
            try:
                yield
            finally:
                handle.cancel()


class _Rollout:
    """The state of one rollout while it runs."""

    def __init__(self, player: Player, episode: Episode) -> None:
        self.player = player
        self.episode = episode
        self.session = f"{episode.group_id}-{episode.id}"
        self.ids: list[int] = []
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.metrics: dict[str, float] = {}
        self.reward = 0.0
        self.sampled = 0
        self.tool_calls = 0
        self._env: AsyncEnv | None = None

    async def run(self) -> StopReason:
        player = self.player
        with _blame(EnvironmentFault):
            self._env = env = player.make_env()
            observation, info = await env.areset(seed=self.episode.env_seed, options={"task": self.episode.task})
        self.messages.extend(observation)
        new_ids = player.chat.prompt_ids(observation, info.get("tools", ()))
        while True:
            budget, reason = player.limits.turn_budget(sampled=self.sampled, length=len(self.ids) + len(new_ids))
            if budget <= 0:
                return reason
            generation = await self._generate(new_ids, budget)
            if generation.finish == "abort":
                return StopReason.CANCELLED
            text = player.chat.decode(generation.output_ids)
            action = player.parse(text)
            self.messages.append(action if action.content == text else replace(action, content=text))
            if generation.finish == "length":
                return reason
            limit = player.limits.tool_calls
            if limit is not None and self.tool_calls + len(action.tool_calls) > limit:
                return StopReason.TRUNCATED_TOOL_CALLS
            stop, observation = await self._step(env, action)
            if stop is not None:
                return stop
            if len(self.turns) >= player.limits.turns:
                return StopReason.TRUNCATED_TURNS
            new_ids = player.chat.suffix_ids(observation, last_output=generation.output_ids)

    async def _generate(self, new_ids: list[int], budget: int) -> Generation:
        player, started = self.player, self.player.clock.now()
        self.ids.extend(new_ids)
        request = GenerationRequest(
            rid=f"{self.session}-{len(self.turns)}",
            input_ids=self.ids,
            sampling=SamplingParams(
                max_new_tokens=budget,
                temperature=player.temperature,
                top_p=player.top_p,
                top_k=player.top_k,
                stop_token_ids=player.chat.stop_token_ids,
                seed=self.episode.sampling_seed * 1009 + len(self.turns),
            ),
            session=self.session,
        )
        with _blame(EngineError):
            try:
                generation = await player.engine.generate(request)
            except asyncio.CancelledError:
                await _finish(player.engine.abort(request.rid))
                raise
            turn = Turn(
                prompt_ids=tuple(new_ids),
                output_ids=generation.output_ids,
                logprobs=generation.logprobs,
                spans=generation.spans,
                finish=generation.finish,
                segments=generation.segments,
                generate_seconds=player.clock.now() - started,
            )
        self.turns.append(turn)
        self.ids.extend(generation.output_ids)
        self.sampled += len(generation.output_ids)
        return generation

    async def _step(self, env: AsyncEnv, action: Message) -> tuple[StopReason | None, tuple[Message, ...]]:
        started = self.player.clock.now()
        cost = self._tool_cost(action)
        if cost:
            await self.player.clock.sleep(sum(cost.values()))
        with _blame(EnvironmentFault):
            observation, reward, terminated, truncated, info = await env.astep(action)
        self.turns[-1] = self.turns[-1].answered(self.player.clock.now() - started)
        self.tool_calls += len(action.tool_calls)
        self.reward += _checked(reward)
        self.messages.extend(observation)
        for name, value in info.get("metrics", {}).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value) + cost.get(name, 0.0)
        if terminated:
            return StopReason.TERMINATED, observation
        if truncated:
            return StopReason.TRUNCATED_ENVIRONMENT, observation
        return None, observation

    def _tool_cost(self, action: Message) -> dict[str, float]:
        """Seconds by metric of the calls of a turn that could be read; they run one after another."""
        cost: dict[str, float] = {}
        if self.player.tool_seconds is not None:
            for number, call in enumerate(action.tool_calls, start=self.tool_calls):
                if call.error is None:
                    name = f"tool/{call.name}/seconds"
                    seconds = self.player.tool_seconds(self.episode.sampling_seed, number)
                    cost[name] = cost.get(name, 0.0) + seconds
        return cost

    async def aclose(self) -> None:
        env, self._env = self._env, None
        try:
            if env is not None:
                with _blame(EnvironmentFault):
                    await env.aclose()
        finally:
            await self.player.engine.release(self.session)


def _checked(reward: object) -> float:
    """A reward as a finite float, or GraderError."""
    try:
        value = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise GraderError(f"a reward must be a number, got {reward!r}") from None
    if not math.isfinite(value):
        raise GraderError(f"a reward must be finite, got {value}")
    return value


class _blame:
    """Assign an exception that names no layer itself to `layer`."""

    __slots__ = ("layer",)

    def __init__(self, layer: type[PaceError]) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PaceError):
            raise self.layer(f"{type(error).__name__}: {error}") from error


async def _finish(cleanup: Any) -> None:
    """Await a cleanup to its end even when this task is cancelled meanwhile; the cancellation rises afterwards."""
    task = asyncio.ensure_future(cleanup)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise
