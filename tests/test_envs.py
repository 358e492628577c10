"""Environments: Gymnasium's rules, episodes of the shop, rewards that fail, sandboxes that are closed exactly once."""

import asyncio
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit

from pace_agent import registry
from pace_agent.envs import ToolEnv, load_reward, make_task, tool
from pace_agent.envs.math_python import MathPythonEnv
from pace_agent.envs.shop.env import ITEMS, ShopEnv, parse_answer
from pace_agent.errors import EnvironmentFault, GraderError, SandboxError, UserError
from pace_agent.sandbox import check
from pace_agent.sandbox.base import ExecResult, Outcome, SandboxSpec, Session
from pace_agent.types import Message, Task, ToolCall

EXAMPLE = Path(__file__).parents[1] / "examples" / "number_env.py"


def says(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, tool_calls=calls)


def look_up(task: Task) -> list[ToolCall]:
    return [ToolCall("price", {"item": item}) for item, _ in task.data["basket"]]


def expression(task: Task) -> str:
    return "+".join(f"{count}*{task.data['prices'][item]}" for item, count in task.data["basket"])


@pytest.mark.parametrize("env_id", ["pace/Shop-v0", "pace/MathPython-v0"])
def test_gymnasium_accepts_the_environment(env_id: str) -> None:
    registry.install()
    check_env(gymnasium.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", ["pace/Shop-v0", "pace/MathPython-v0"])
def test_spaces_hold_their_samples_and_what_the_environment_says(env_id: str) -> None:
    env = registry.make(env_id)
    env.action_space.seed(0)
    for _ in range(30):
        observation, _ = env.reset()
        assert observation in env.observation_space
        action = env.action_space.sample()
        assert action in env.action_space
        assert env.step(action)[0] in env.observation_space
    assert env.observation_space.sample() in env.observation_space
    assert Message("user", "x") not in env.action_space
    env.close()


def test_wrappers_see_an_ordinary_environment() -> None:
    inner: Any = ShopEnv()
    env = RecordEpisodeStatistics(TimeLimit(OrderEnforcing(PassiveEnvChecker(inner)), 3))
    with pytest.raises(ResetNeeded):
        env.step("hello")
    env.reset(seed=5)
    task = inner.task
    assert env.step(says("", *look_up(task)))[1:4] == (0.0, False, False)
    env.step(says("", ToolCall("calculator", {"expression": expression(task)})))
    _, reward, terminated, truncated, info = env.step(f"Answer: {task.answer}")
    assert (reward, terminated, truncated) == (1.0, True, True)
    assert (info["episode"]["r"], info["episode"]["l"]) == (1.0, 3)
    env.close()


async def test_a_shop_episode_is_solved_by_its_tools_alone() -> None:
    env = ShopEnv()
    for seed in range(20):
        messages, info = await env.areset(seed=seed)
        assert [message.role for message in messages] == ["system", "user"]
        assert [each["function"]["name"] for each in info["tools"]] == ["price", "calculator"]
        prices = [int(said.content) for said in (await env.astep(says("", *look_up(env.task))))[0]]
        shopping = messages[1].content
        counts = [int(word) for word in shopping.split() if word.isdigit()]
        total = sum(count * price for count, price in zip(counts, prices, strict=True))
        said, reward, terminated, truncated, info = await env.astep(f"It is\nAnswer: {total}")
        assert (said, reward, terminated, truncated, info["reward_parts"]) == ((), 1.0, True, False, {})
        with pytest.raises(ResetNeeded):
            await env.astep("Answer: 1")
    await env.aclose()


def test_the_price_list_is_hidden() -> None:
    env = ShopEnv()
    for seed in range(50):
        messages, _ = env.reset(seed=seed)
        text = " ".join(message.content for message in messages)
        assert str(env.task.answer) not in text.split()
    env.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", 42),
        ("So it is\nAnswer: 42\n", 42),
        ("Answer: 41\nAnswer: 42", None),
        ("Answer: 42 or 43", None),
        ("Answer: 42.", None),
        ("Answer: 42\nI think", None),
        ("answer: 42", None),
        ("Answer:42", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_answer_is_read_strictly(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


async def test_prices_by_one_or_many_and_not_of_everything() -> None:
    env = ShopEnv()
    await env.areset(seed=0)
    item = next(iter(env.task.data["prices"]))
    other = next(each for each in ITEMS if each not in env.task.data["prices"])
    calls = [ToolCall("price", {"item": name}) for name in (item, ITEMS[item].upper(), other)]
    said, _, over, _, info = await env.astep(says("", *calls))
    assert said[0].content == said[1].content == str(env.task.data["prices"][item])
    assert said[2].content == f"Error: no price for {other!r}"
    assert not over
    assert info["metrics"]["tool/price/calls"] == 3
    assert info["metrics"]["tool/price/errors"] == 1


async def test_made_up_tools_are_told_and_counted_together() -> None:
    env = ShopEnv()
    await env.areset(seed=0)
    said, _, over, _, info = await env.astep(says("", ToolCall("prise"), ToolCall("", {}, error="not JSON")))
    assert [message.content for message in said] == [
        "Error: there is no tool 'prise'. Did you mean 'price'?",
        "Error: not JSON",
    ]
    assert not over
    assert info["metrics"] == {"tool/unknown/calls": 2.0, "tool/unknown/errors": 2.0}


def test_which_tools_are_slow_follows_from_the_seed() -> None:
    def delays(seed: int) -> list[float]:
        env = ShopEnv(tool_delay=0.05, slow_share=0.2, slow_delay=1.0)
        env.reset(seed=seed)
        return [env.next_delay() for _ in range(100)]

    assert delays(1) == delays(1) != delays(2)
    assert 5 < delays(1).count(1.0) < 40
    assert set(delays(1)) == {0.05, 1.0}
    with pytest.raises(UserError):
        ShopEnv(slow_share=1.5)


def test_reset_takes_a_task_or_draws_one_of_a_split() -> None:
    env = ShopEnv()
    task = ShopEnv.tasks.task("train", 3)
    messages, info = env.reset(seed=1, options={"task": task})
    assert messages[-1].content == task.prompt
    assert info["task_id"] == task.id
    train, held_out = (env.reset(seed=1, options={"split": split})[0] for split in ("train", "eval"))
    assert train != held_out
    with pytest.raises(UserError, match=r"'tsak'.*Did you mean 'task'"):
        env.reset(options={"tsak": task})
    with pytest.raises(UserError, match="must be a Task"):
        env.reset(options={"task": "plums"})
    env.close()


async def test_the_synchronous_methods_work_inside_a_running_loop() -> None:
    env = ShopEnv()
    messages, _ = env.reset(seed=1)
    assert len(messages) == 2
    assert env.step("Answer: 0")[2]
    env.close()
    env.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        env.reset()


def test_environments_pickle() -> None:
    env = ShopEnv()
    env.reset(seed=1)
    copy = pickle.loads(pickle.dumps(env))
    calls = says("", *look_up(env.task), ToolCall("calculator", {"expression": "1+1"}))
    assert copy.step(calls)[0] == env.step(calls)[0]
    assert copy.next_delay() == 0


class Echo(ToolEnv):
    """Say something."""

    async def reward(self, messages: tuple[Message, ...], answer: str, task: Task) -> Any:
        await asyncio.sleep(0)
        return {"long": len(answer), "turns": len(messages)}


def never(answer: str) -> Any:
    return None


def test_rewards_may_have_parts_and_be_replaced() -> None:
    task = make_task("Say something.")
    env = Echo()
    env.reset(options={"task": task})
    _, reward, _, _, info = env.step("four")
    assert (reward, info["reward_parts"]) == (6.0, {"long": 4.0, "turns": 2.0})
    short = Echo(reward=lambda answer: -len(answer), system="Be short.")
    messages, _ = short.reset(options={"task": task})
    assert messages[0] == Message("system", "Be short.")
    assert short.step("four")[1] == -4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        (float("nan"), "expected a finite number"),
        (float("inf"), "expected a finite number"),
        ("good", "expected a number"),
        ({"a": 1.0, "b": None}, "part 'b', returned None"),
        (ZeroDivisionError("oops"), "raised ZeroDivisionError: oops"),
    ],
)
def test_a_reward_that_is_no_number_is_the_graders_fault(returned: Any, message: str) -> None:
    def graded(answer: str) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    env = Echo(reward=graded)
    env.reset(options={"task": make_task("x")})
    with pytest.raises(GraderError, match=message):
        env.step("y")


def test_rewards_are_loaded_by_name() -> None:
    assert load_reward(f"{__name__}:never") is never
    with pytest.raises(UserError, match=r"no 'nevr'.*Did you mean 'never'"):
        load_reward(f"{__name__}:nevr")
    with pytest.raises(UserError, match="not an import path"):
        load_reward("never")
    with pytest.raises(UserError, match=r"asks for 'anser'.*Did you mean 'answer'"):
        load_reward(f"{__name__}:misspelt")


def misspelt(anser: str) -> float:
    return 0.0


class Talk(ToolEnv):
    """Guess until it is right."""

    def start(self, task: Task) -> None:
        self.found = False

    @tool
    def peek(self) -> str:
        """Look at the answer and lose."""
        self.found = True
        return "blue"

    async def reply(self, message: Message) -> str | None:
        return None if message.content == "blue" else "Wrong, guess again."

    def is_over(self) -> bool:
        return self.found

    def reward(self, answer: str) -> float:
        return float(answer == "blue")


def test_a_user_may_reply_and_a_tool_may_end_the_episode() -> None:
    env = Talk()
    env.reset(options={"task": make_task("Which colour?")})
    assert env.step(says("red"))[:3] == ((Message("user", "Wrong, guess again."),), 0.0, False)
    assert env.step(says("blue"))[:3] == ((), 1.0, True)
    env.reset(options={"task": make_task("Which colour?")})
    said, reward, over, _, _ = env.step(says("blue", ToolCall("peek")))
    # A turn that calls a tool is no final answer, so that there is nothing to score.
    assert (said[0].content, reward, over) == ("blue", 0.0, True)


def test_a_tool_never_hides_what_an_environment_does() -> None:
    with pytest.raises(UserError, match=r"can't be called 'close'.*@tool\(name='close'\)"):

        class Wrong(ToolEnv):
            """Close doors."""

            @tool
            def close(self) -> str:
                """Close the door."""
                return "bang"

    class Right(Echo):
        """Close doors."""

        @tool(name="close")
        def close_door(self) -> str:
            """Close the door."""
            return "bang"

    env = Right()
    _, info = env.reset(options={"task": make_task("x")})
    assert [each["function"]["name"] for each in info["tools"]] == ["close"]
    assert env.step(says("", ToolCall("close")))[0][0].content == "bang"
    env.close()


class Broken(ToolEnv):
    """Fail."""

    def start(self, task: Task) -> None:
        raise KeyError("row")

    reward = staticmethod(lambda answer: 1.0)


async def test_an_environments_own_bug_names_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match="Broken: start raised KeyError"):
        await Broken().areset(options={"task": make_task("x")})
    with pytest.raises(UserError, match="Broken has no tasks"):
        await Broken().areset(seed=1)


class Box:
    """A session that counts how often it is closed."""

    def __init__(self, shop: "Boxes") -> None:
        self.shop = shop
        self.open = True

    async def run_python(self, code: str, *, timeout: float | None = None) -> ExecResult:
        assert self.open
        return ExecResult(Outcome.OK, stdout=code)

    async def close(self) -> None:
        assert self.open, "closed twice"
        self.open = False
        self.shop.closed += 1


class Boxes:
    """A provider that counts; `gate` holds up opening."""

    def __init__(self) -> None:
        self.opened = self.closed = self.closed_provider = 0
        self.gate: asyncio.Event | None = None
        self.spec: SandboxSpec | None = None

    async def open(self, spec: SandboxSpec | None = None) -> Session:
        if self.gate is not None:
            await self.gate.wait()
        self.spec = spec
        self.opened += 1
        return Box(self)  # type: ignore[return-value]

    async def aclose(self) -> None:
        self.closed_provider += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def run(code: str) -> Message:
    return says("", ToolCall("python", {"code": code}))


async def test_a_session_is_opened_when_needed_and_closed_exactly_once() -> None:
    boxes = Boxes()
    env = MathPythonEnv(sandbox=boxes)
    await env.areset(seed=0)
    assert boxes.opened == 0
    said = (await env.astep(run("1")))[0] + (await env.astep(run("2")))[0]
    assert [message.content for message in said] == ["1", "2"]
    assert (boxes.opened, boxes.closed) == (1, 0)
    assert boxes.spec == env.sandbox_spec
    await env.areset(seed=1)
    assert (boxes.opened, boxes.closed) == (1, 1)
    await env.astep(run("3"))
    await asyncio.gather(env.aclose(), env.aclose())
    await env.aclose()
    env.close()
    assert (boxes.opened, boxes.closed, boxes.closed_provider) == (2, 2, 0)


async def test_a_session_that_opens_while_the_environment_closes_is_closed_too() -> None:
    boxes = Boxes()
    boxes.gate = asyncio.Event()
    env = MathPythonEnv(sandbox=boxes)
    await env.areset(seed=0)
    stepping = asyncio.create_task(env.astep(run("1")))
    await asyncio.sleep(0)
    closing = asyncio.create_task(env.aclose())
    await asyncio.sleep(0)
    boxes.gate.set()
    await asyncio.gather(stepping, closing, return_exceptions=True)
    assert (boxes.opened, boxes.closed) == (1, 1)


async def test_a_sandbox_that_is_not_there_is_not_the_models_fault() -> None:
    class Nothing(Boxes):
        async def open(self, spec: SandboxSpec | None = None) -> Session:
            raise SandboxError("no room")

    env = MathPythonEnv(sandbox=Nothing())
    await env.areset(seed=0)
    with pytest.raises(SandboxError, match="no room"):
        await env.astep(run("1"))


async def test_a_mathematical_problem_is_solved_in_the_real_sandbox() -> None:
    found = next(each for each in check() if each.backend == "bwrap")
    if not found.available:
        pytest.skip(found.reason)
    env: Any = registry.make("pace/MathPython-v0").unwrapped
    await env.areset(options={"task": make_task("What is the sum of the digits of $2^{100}$?", answer="115")})
    said, _, _, _, info = await env.astep(run("total = sum(map(int, str(2**100)))\ntotal"))
    assert said[0].content == "115"
    assert info["metrics"]["tool/python/errors"] == 0
    said, *_ = await env.astep(run("print(total + 1)\nmissing"))
    assert said[0].content.startswith("116\n")
    assert "NameError" in said[0].content
    assert (await env.astep("It is \\boxed{115}."))[1:3] == (1.0, True)
    await env.aclose()


async def test_boxes_outside_the_final_turn_do_not_count() -> None:
    env = MathPythonEnv(sandbox=Boxes())
    task = make_task("What is 6 * 7? Not \\boxed{42}.", answer="42")
    await env.areset(options={"task": task})
    await env.astep(run("\\boxed{42}"))
    assert (await env.astep("It is 42."))[1:3] == (0.0, True)
    await env.areset(options={"task": task})
    assert (await env.astep("First \\boxed{41}, no: \\boxed{42}."))[1:3] == (1.0, True)
    await env.aclose()


async def test_the_example_works() -> None:
    env: Any = registry.make(f"{EXAMPLE}:NumberEnv")
    rewards = []
    for seed in range(5):
        await env.areset(seed=seed)
        low, high = (int(word) for word in env.task.prompt.rstrip(".").split() if word.isdigit())
        while low < high:
            middle = (low + high) // 2
            (said,) = (await env.astep(says("", ToolCall("compare", {"number": middle}))))[0]
            low, high = {"lower": (low, middle - 1), "higher": (middle + 1, high), "equal": (middle, middle)}[
                said.content
            ]
        rewards.append((await env.astep(str(low)))[1])
    assert rewards == [1.0] * 5
    assert env.asked <= 6


def test_everything_an_environment_is_given_is_named_when_wrong() -> None:
    cases: list[tuple[Mapping[str, Any], str]] = [
        ({"tasks": "nowhere.jsonl"}, "no task file"),
        ({"reward": "nowhere:function"}, "no module 'nowhere'"),
    ]
    for given, message in cases:
        with pytest.raises(UserError, match=message):
            Echo(**given)
