"""The base of tool environments: a Gymnasium environment whose observation is messages and whose action is a turn.

    class Orders(ToolEnv):
        '''Answer questions about orders.'''

        system = "Look things up, then answer."
        tasks = JsonlTasks("orders.jsonl")
        tools = [calculator]

        @tool
        async def find(self, customer: str) -> list[str]:
            '''Orders of one customer.'''
            ...

        def reward(self, answer: str, task: Task) -> float:
            return float(answer == task.answer)

What always holds:

* One object serves one rollout at a time; what belongs to an episode is set in `start`.
* `areset(seed=s)` is deterministic. `options={"task": task}` sets the task; else one is drawn from `tasks` by the seed.
* What the model did wrong is an observation. What raises is a typed error of `pace_agent.errors`.
* The sandbox session is opened when a tool first needs it, and closed exactly once: at the next reset or at `aclose`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import gymnasium
from gymnasium.error import ResetNeeded

from pace_agent.envs.bridge import run_sync
from pace_agent.envs.rewards import RewardFunction, load_reward, score
from pace_agent.envs.spaces import MessagesSpace, TurnSpace
from pace_agent.envs.tasks import load_tasks
from pace_agent.errors import EnvironmentFault, PaceError, SandboxError, UserError, did_you_mean
from pace_agent.sandbox.base import Provider, SandboxSpec, Session
from pace_agent.tasks import TaskSource
from pace_agent.tools.base import Tool, ToolResult, ToolSet, declared_tools
from pace_agent.types import Message, Split, Task, ToolCall

Messages = tuple[Message, ...]
_OPTIONS = ("task", "split")


class ToolEnv(gymnasium.Env[Messages, Message | str]):
    """A conversation in which the model may call tools; the final turn is scored."""

    system: str = ""
    """The system prompt; none if empty."""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    """Tools beside those that are declared as methods."""
    tasks: TaskSource | None = None
    """Where tasks come from."""
    sandbox_spec: ClassVar[SandboxSpec | None] = None
    """Limits of a sandbox session: what differs from the defaults of SandboxSpec wins over those of the provider."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, Tool) and hasattr(ToolEnv, name):
                raise UserError(
                    f"{cls.__name__}: a tool method can't be called {name!r}, which every environment has already; "
                    f"call it otherwise and write @tool(name={name!r})"
                )

    def __init__(
        self,
        *,
        tasks: TaskSource | str | None = None,
        reward: RewardFunction | str | None = None,
        system: str | None = None,
        sandbox: Provider | None = None,
    ) -> None:
        """Everything is optional and replaces what the class says.

        Args:
            tasks: A source, or its name (`file.jsonl`, `hf:name`).
            reward: A reward function, or its name (`module:function`).
            system: The system prompt.
            sandbox: Opens the sessions. Without it the environment opens a provider of its own when one is needed.
        """
        if tasks is not None:
            self.tasks = load_tasks(tasks) if isinstance(tasks, str) else tasks
        if system is not None:
            self.system = system
        self._reward = load_reward(reward) if isinstance(reward, str) else reward
        self.observation_space = MessagesSpace()
        self.action_space = TurnSpace()
        self.toolset = ToolSet([*declared_tools(self), *self.tools], session=self.session)
        self._provider = sandbox
        self._owns_provider = False
        self._session: Session | None = None
        self._session_lock = asyncio.Lock()
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._over = True
        self._closed = False

    # What an environment defines -------------------------------------------------------------------------------------

    def start(self, task: Task) -> Awaitable[None] | None:
        """Set what belongs to one episode. May be asynchronous."""
        return None

    def opening(self, task: Task) -> Messages:
        """The first messages: the system prompt and the task's prompt."""
        user = Message("user", task.prompt)
        return (Message("system", self.system), user) if self.system else (user,)

    def reply(self, message: Message) -> Any:
        """What the user says to a turn that calls no tool: a text, or None to end the episode (the default).

        May be asynchronous.
        """
        return None

    def is_over(self) -> bool:
        """Whether the episode ends after the tools of a turn have run."""
        return False

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """The score of a finished episode, as `pace_agent.envs.rewards` describes it. May be asynchronous."""
        raise UserError(f"{type(self).__name__} has no reward: define reward(self, answer, task) or pass reward=")

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Answer one call; the place to wrap every call of an environment."""
        return await self.toolset.call(call)

    # What an environment may use -------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The task of the episode."""
        if self._task is None:
            raise ResetNeeded("call reset before using the environment")
        return self._task

    @property
    def messages(self) -> Messages:
        """The conversation so far."""
        return tuple(self._messages)

    async def session(self) -> Session:
        """The episode's sandbox session, opened on the first call."""
        async with self._session_lock:
            if self._closed:
                raise EnvironmentFault(f"{type(self).__name__} is closed")
            if self._session is None:
                if self._provider is None:
                    self._provider, self._owns_provider = await _own_provider(), True
                spec = self.sandbox_spec
                self._session = await self._provider.open(None if spec is None else spec.over(self._provider.spec))
            return self._session

    # Gymnasium, asynchronous -----------------------------------------------------------------------------------------

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Messages, dict[str, Any]]:
        """Begin an episode. `info["tools"]` holds the tools as JSON schemas."""
        if self._closed:
            raise EnvironmentFault(f"{type(self).__name__} is closed")
        super().reset(seed=seed)
        await self._close_session()
        self._task = task = self._choose(dict(options or {}))
        self._over = False
        with _blame(self, "start"):
            await _awaited(self.start(task))
            self._messages = list(self.opening(task))
        return self.messages, {"task_id": task.id, "tools": self.toolset.schemas()}

    async def astep(self, action: Message | str) -> tuple[Messages, float, bool, bool, dict[str, Any]]:
        """Take the model's turn: run its tool calls in order, or end the episode and score it.

        `info["metrics"]` counts the tool calls; `info["reward_parts"]` holds the parts of a reward that names them.
        """
        if self._over:
            raise ResetNeeded("the episode is over: call reset")
        message = _as_message(action)
        self._messages.append(message)
        said: list[Message] = []
        metrics: dict[str, float] = {}
        for call in message.tool_calls:
            with _blame(self, f"tool {call.name!r}"):
                result = await self.run_tool(call)
            said.append(result.message())
            _count(metrics, result, self.toolset)
        with _blame(self, "reply"):
            if message.tool_calls:
                over = self.is_over()
            else:
                text = await _awaited(self.reply(message))
                over = text is None
                said += [] if text is None else [Message("user", str(text))]
        self._messages.extend(said)
        self._over = over
        info: dict[str, Any] = {"metrics": metrics}
        value = 0.0
        if over:
            value, parts = await score(
                self._reward or self.reward,
                task=self.task,
                messages=self.messages,
                answer="" if message.tool_calls else message.content,
            )
            info["reward_parts"] = parts
        return tuple(said), value, over, False, info

    async def aclose(self) -> None:
        """Close what is open. Closing twice is fine."""
        self._closed = self._over = True
        try:
            await self._close_session()
        finally:
            owned, self._owns_provider = self._owns_provider, False
            if owned and self._provider is not None:
                await self._provider.aclose()

    async def _close_session(self) -> None:
        async with self._session_lock:
            session, self._session = self._session, None
        if session is not None:
            await session.close()

    # Gymnasium, synchronous ------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Messages, dict[str, Any]]:
        return run_sync(self.areset(seed=seed, options=options))

    def step(self, action: Message | str) -> tuple[Messages, float, bool, bool, dict[str, Any]]:
        return run_sync(self.astep(action))

    def close(self) -> None:
        if self._session is None and not self._owns_provider:
            self._closed = self._over = True
            return
        run_sync(self.aclose())

    def _choose(self, options: dict[str, Any]) -> Task:
        for key in options:
            if key not in _OPTIONS:
                raise UserError(f"unknown reset option {key!r}.{did_you_mean(key, _OPTIONS)}")
        task = options.get("task")
        if task is not None:
            if not isinstance(task, Task):
                raise UserError(f"reset option 'task' must be a Task, got {type(task).__name__}")
            return task
        if self.tasks is None:
            raise UserError(f"{type(self).__name__} has no tasks: set the class attribute or pass tasks=")
        split = cast(Split, options.get("split", "train"))
        size = self.tasks.size(split)
        return self.tasks.task(split, int(self.np_random.integers(0, 1 << 31 if size is None else size)))


class _blame:
    """Turns an exception of an environment's own code into EnvironmentFault that names the place."""

    def __init__(self, env: ToolEnv, place: str) -> None:
        self.where = f"{type(env).__name__}: {place}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PaceError):
            raise EnvironmentFault(f"{self.where} raised {type(error).__name__}: {error}") from error


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _as_message(action: Message | str) -> Message:
    if isinstance(action, str):
        from pace_agent.tools.parsers import get_parser

        return get_parser("hermes")(action)
    if not isinstance(action, Message) or action.role != "assistant":
        raise UserError(f"an action is the text of a turn or a message of role 'assistant', got {action!r}")
    return action


def _count(metrics: dict[str, float], result: ToolResult, tools: ToolSet) -> None:
    """Figures per tool; names that a model made up are counted together."""
    known = result.call.name in tools.names()
    label = f"tool/{result.call.name}" if known else "tool/unknown"
    metrics[f"{label}/calls"] = metrics.get(f"{label}/calls", 0.0) + 1.0
    metrics[f"{label}/errors"] = metrics.get(f"{label}/errors", 0.0) + float(result.error)
    if result.executed:
        metrics[f"{label}/seconds"] = metrics.get(f"{label}/seconds", 0.0) + result.seconds


async def _own_provider() -> Provider:
    from pace_agent.sandbox import open_provider

    try:
        return await open_provider().__aenter__()
    except UserError as error:
        # In the middle of an episode this is a sandbox that is not there, and no fault of the model's.
        raise SandboxError(str(error)) from error
