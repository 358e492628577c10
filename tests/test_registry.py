"""Ids: built in, registered, from entry points, by import path; the same in a child process."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from pace_agent import registry
from pace_agent.envs import ToolEnv
from pace_agent.errors import UserError
from pace_agent.tasks import TaskSource
from pace_agent.types import Task

SOURCE = '''
"""A module with environments."""
import gymnasium
from pace_agent.envs import Procedural, ToolEnv, make_task, tool


class DiceEnv(ToolEnv):
    """Roll dice.

    More words.
    """

    tasks = Procedural(lambda rng: make_task(f"Roll {rng.randint(1, 999)}.", answer=1))

    def __init__(self, *, sides: int = 6, **options):
        super().__init__(**options)
        self.sides = sides

    @tool
    def roll(self) -> int:
        """Roll."""
        return 1 + int(self.np_random.integers(self.sides))

    def reward(self, answer: str) -> float:
        return float(answer == "1")


NotAnEnv = dict
value = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is importable because it is the current one."""
    path = tmp_path / "acme_dice.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "acme_dice", raising=False)
    monkeypatch.delenv("PACE_REGISTERED_ENVS", raising=False)
    return path


def publish(folder: Path, package: str, **points: str) -> None:
    """What installing a package with these entry points leaves behind."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    info.joinpath("entry_points.txt").write_text(f"[pace_agent.envs]\n{lines}")


def test_built_in_ids_are_in_gymnasiums_registry() -> None:
    registry.install()
    assert set(registry.BUILTIN) <= set(registry.env_ids())
    for env_id in registry.BUILTIN:
        env = gymnasium.make(env_id)
        assert isinstance(env.unwrapped, ToolEnv)
        assert env.spec is not None
        assert env.spec.id == env_id
        env.close()


@pytest.mark.parametrize("env_id", ["acme_dice:DiceEnv", "acme_dice.py:DiceEnv", "./acme_dice.py:DiceEnv"])
def test_an_import_path_is_an_id(module: Path, env_id: str) -> None:
    env: Any = registry.make(env_id, sides=2)
    env.reset(seed=0)
    assert env.sides == 2
    assert type(env) is type(registry.make(env_id))
    assert registry.describe(env_id) == registry.Description(
        id=env_id, source="import path", target=env_id, summary="Roll dice.", tools=("roll",)
    )


def test_what_is_registered_can_be_made(module: Path) -> None:
    registry.register("acme/Dice-v0", "acme_dice:DiceEnv", sides=3)
    env: Any = registry.make("acme/Dice-v0").unwrapped
    assert env.sides == 3
    registry.register("acme/Dice-v0", "acme_dice:DiceEnv", sides=4)
    env = registry.make("acme/Dice-v0").unwrapped
    assert env.sides == 4
    assert registry.describe("acme/Dice-v0").source == "registered"


@pytest.mark.parametrize(
    ("env_id", "target", "message"),
    [
        ("acme dice", "a:B", "not an environment id"),
        ("acme/Dice", "a:B", "not an environment id"),
        ("acme/Dice-v0", "DiceEnv", "not an import path"),
        ("pace/Shop-v0", "a:B", "built in"),
    ],
)
def test_what_cannot_be_registered(env_id: str, target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry.register(env_id, target)


def test_entry_points_are_found_and_a_broken_one_disturbs_nobody(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    publish(
        site,
        "acme",
        **{
            "acme/Entry-v0": "acme_dice:DiceEnv",
            "acme/Lost-v0": "acme_lost:DiceEnv",
            "acme/Typo-v0": "acme_dice:DiceEvn",
            "nonsense": "acme_dice:DiceEnv",
            "pace/Shop-v0": "acme_dice:DiceEnv",
        },
    )
    monkeypatch.syspath_prepend(site)
    assert {"acme/Entry-v0", "acme/Lost-v0", "nonsense", "pace/Shop-v0"} <= set(registry.env_ids())
    described = {env_id: registry.describe(env_id) for env_id in registry.env_ids()}
    assert described["acme/Entry-v0"].source == "entry point"
    assert described["acme/Entry-v0"].tools == ("roll",)
    assert "no module 'acme_lost'" in described["acme/Lost-v0"].error
    assert "from acme" in described["acme/Lost-v0"].error
    assert "Did you mean 'DiceEnv'" in described["acme/Typo-v0"].error
    assert "not an environment id" in described["nonsense"].error
    assert described["pace/Shop-v0"].source == "builtin"
    assert described["pace/Shop-v0"].tools == ("price", "calculator")
    with pytest.raises(UserError, match=r"acme/Lost-v0 \(from acme\)"):
        registry.make("acme/Lost-v0")


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("pace/Shopp-v0", r"no environment 'pace/Shopp-v0'. Did you mean 'pace/Shop-v0'"),
        ("Shop", r"Did you mean 'pace/Shop-v0'"),
        ("pace/mathpython-v3", r"Did you mean 'pace/MathPython-v0'"),
        ("CartPole-v99", r"Did you mean 'CartPole-v1'"),
        ("acme_dice:DieEnv", r"no 'DieEnv'.*Did you mean 'DiceEnv'"),
        ("acme_dic.py:DiceEnv", r"no file 'acme_dic.py'.*Did you mean 'acme_dice.py'"),
        ("acme_nowhere:DiceEnv", r"no module 'acme_nowhere'"),
        ("acme_dice:value", r"is a int, not an environment class"),
        ("acme_dice:NotAnEnv", r"made a dict, not a gymnasium.Env"),
        ("", r"no environment ''"),
    ],
)
def test_an_unknown_id_is_named_with_the_closest(module: Path, env_id: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry.make(env_id)


def test_a_file_that_fails_to_import_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken_env.py"
    path.write_text("import nowhere_at_all\n")
    with pytest.raises(UserError, match=r"failed to import: ModuleNotFoundError: No module named 'nowhere_at_all'"):
        registry.make(f"{path}:Env")
    path.write_text(SOURCE)
    registry.make(f"{path}:DiceEnv")


def test_an_argument_that_is_not_taken_is_named(module: Path) -> None:
    with pytest.raises(UserError, match=r"no argument 'tool_dealy'.*Did you mean 'tool_delay'"):
        registry.make("pace/Shop-v0", tool_dealy=1)
    with pytest.raises(UserError, match=r"no argument 'side'.*Did you mean 'sides'"):
        registry.make("acme_dice:DiceEnv", side=1)
    with pytest.raises(UserError, match=r"no argument 'sandbx'.*Did you mean 'sandbox'"):
        registry.make("pace/MathPython-v0", sandbx=1)


def test_descriptions_are_plain_data() -> None:
    assert registry.describe("pace/MathPython-v0").to_dict() == {
        "id": "pace/MathPython-v0",
        "source": "builtin",
        "target": "pace_agent.envs.math_python:MathPythonEnv",
        "summary": registry.describe("pace/MathPython-v0").summary,
        "tools": ["python"],
        "needs_sandbox": True,
        "error": "",
    }
    assert registry.describe("CartPole-v1").source == "gymnasium"
    assert "no environment" in registry.describe("pace/Nothing-v0").error


def test_task_sources() -> None:
    shop = registry.task_source("pace/Shop-v0")
    assert isinstance(shop, TaskSource)
    assert shop.task("train", 0).prompt
    seeds = registry.task_source("CartPole-v1")
    assert seeds.task("train", 5) == Task(id="seed-5", prompt="", seed=5)
    assert seeds.task("eval", 5).seed == (1 << 30) + 5
    with pytest.raises(UserError, match="has no tasks"):
        registry.task_source("pace_agent.envs:ToolEnv")


def in_child(env_id: str) -> tuple[str, list[str], Any]:
    env = registry.make(env_id)
    inner: Any = env.unwrapped
    task = registry.task_source(env_id).task("train", 7)
    observation, info = env.reset(seed=1, options={"task": task})
    env.close()
    return type(inner).__qualname__, [each["function"]["name"] for each in info["tools"]], observation


def test_a_spawned_worker_finds_the_same_environments(module: Path) -> None:
    registry.register("acme/Handed-v0", "acme_dice:DiceEnv", sides=8)
    ids = ["pace/Shop-v0", "pace/MathPython-v0", "acme/Handed-v0", "acme_dice.py:DiceEnv", "acme_dice:DiceEnv"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.map(in_child, ids)
        pool.close()
        pool.join()
    assert there == [in_child(env_id) for env_id in ids]


def test_gymnasiums_own_form_of_import_works(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = module.with_name("acme_registers.py")
    other.write_text(
        "import gymnasium\nif 'acme/Own-v0' not in gymnasium.registry:\n"
        "    gymnasium.register('acme/Own-v0', entry_point='acme_dice:DiceEnv')\n"
    )
    assert registry.make("acme_registers:acme/Own-v0").unwrapped.spec is not None
    gymnasium.registry.pop("acme/Own-v0")
