"""The main job end to end: real rollouts, engine, trainer and run folder, on the embedded model, a few steps each."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pace_agent import cli
from pace_agent.cli.embedded import shipped_folder
from pace_agent.report.metrics import read_metrics
from pace_agent.rollout.journal import read_lines

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SMALL = [
    *("--pool.batch_size", "16", "--rollout.group_size", "4", "--rollout.concurrency", "16"),
    *("--run.checkpoint_every", "2", "--trainer.per_device_train_batch_size", "8"),
]
OWN_ENV = """
import random
from pace_agent.envs import Procedural, Task, ToolEnv, make_task, tool

def a_task(rng: random.Random) -> Task:
    return make_task(f"Say something, {rng.randrange(10**6)}.", answer=rng.random())

class Short(ToolEnv):
    '''Be brief.'''
    tasks = Procedural(a_task)

    @tool
    def price(self, item: str) -> str:
        '''A price.

        Args:
            item: Which.
        '''
        return "7"

    def reward(self, answer: str, task: Task) -> float:
        return 1.0 / (1 + len(answer))

class Broken(Short):
    '''A reward that fails as it is told to.'''
    def __init__(self, how: str = "raise", **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def reward(self, answer: str, task: Task):
        if self.how == "raise":
            raise ValueError("no such column")
        return None if self.how == "none" else float("nan")
"""


@pytest.fixture
def threads() -> Iterator[None]:
    """Training sets torch's threads for the whole process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def main(arguments: list[str]) -> int:
    """The exit code of a command."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def train(run: Path, *options: str) -> int:
    return main(["train", "--run-dir", str(run), *SMALL, "--engine.process", "false", *options])


def summary(run: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return out


def check_law(run: Path) -> dict[str, Any]:
    """The ledger balances, agrees with the trajectories' fates, and nothing was trained twice."""
    found = summary(run)
    ledger = found["ledger"]
    assert ledger["submitted"] == sum(count for state, count in ledger.items() if state != "submitted")
    assert ledger["running"] == ledger["drawn"] == 0
    lines = list(read_lines(run / "trajectories.jsonl"))
    trained = [line["id"] for line in lines if line["fate"] == "trained"]
    assert len(trained) == len(set(trained)) == ledger["trained"] == 16 * found["steps"]
    versions = [row["trainer/policy_version"] for row in read_metrics(run / "metrics.jsonl")]
    assert versions == [float(step) for step in range(1, found["steps"] + 1)]
    for line in lines:
        stamps = [stamp for turn in line["turns"] for stamp in turn["stamps"]]
        assert [stamp[0] for stamp in stamps] == sorted(stamp[0] for stamp in stamps)
    return found


@pytest.mark.usefixtures("threads")
def test_an_environment_of_ones_own_trains_and_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN_ENV)
    run = tmp_path / "run"
    assert (
        train(
            run,
            "--env",
            f"{tmp_path}/mine.py:Short",
            "--trainer.max_steps",
            "3",
            "--eval.every",
            "2",
            "--eval.tasks",
            "3",
        )
        == 0
    )
    found = check_law(run)
    assert found["policy_version"] == 3
    assert set(found["staleness"]) == {"generation", "waiting", "effective", "token_mean", "length_ratio", "tail_share"}
    for name in ("config.toml", "metrics.jsonl", "ledger.jsonl", "trajectories.jsonl", "report.png"):
        assert (run / name).stat().st_size > 0
    assert "ledger" in capsys.readouterr().out.splitlines()[-1]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(shipped_folder()).state_dict()
    for folder in ("final", "best"):
        model = AutoModelForCausalLM.from_pretrained(run / folder)
        AutoTokenizer.from_pretrained(run / folder)
        moved = [name for name, value in model.state_dict().items() if not value.equal(before[name].to(value.dtype))]
        assert len(moved) > 10
    assert main(["eval", str(run), "-n", "2", "--tasks", "3", "--json", "--engine.process", "false"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["samples"] == 6
    assert result["errors"] == 0
    assert (
        main(["rollout", "--model", str(run), "--env", f"{tmp_path}/mine.py:Short", "--engine.process", "false"]) == 0
    )
    assert "reward" in capsys.readouterr().out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama folder with the shop's tokenizer and template; its random weights write any byte."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(shipped_folder())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("options", [[], ["--model.lora_r", "4"]], ids=["full", "lora"])
def test_a_saved_llama_folder_trains(tmp_path: Path, llama: Path, options: list[str]) -> None:
    (tmp_path / "mine.py").write_text(OWN_ENV)
    env = f"{tmp_path}/mine.py:Short"
    assert train(tmp_path / "run", "--model", str(llama), "--env", env, "--trainer.max_steps", "2", *options) == 0
    check_law(tmp_path / "run")

    from transformers import AutoModelForCausalLM

    names = AutoModelForCausalLM.from_pretrained(llama).state_dict().keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict().keys() == names


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("how", "said"), [("raise", "no such column"), ("none", "None"), ("nan", "nan")])
def test_a_reward_that_fails_stops_the_run_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN_ENV)
    run = tmp_path / "run"
    assert train(run, "--env", f"{tmp_path}/mine.py:Broken", "--env.kwargs.how", how, "--trainer.max_steps", "2") == 1
    message = capsys.readouterr().err
    assert "failed.grader" in message
    assert "max_failure_share" in message
    assert said in message
    lines = list(read_lines(run / "trajectories.jsonl"))
    assert {line["stop"] for line in lines if line["fate"] == "failed"} == {"failed.grader"}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("policy", ["sync", "bounded_admission"])
def test_a_baseline_runs_the_same_job(tmp_path: Path, policy: str) -> None:
    assert train(tmp_path / "run", "--pool.policy", policy, "--trainer.max_steps", "2") == 0
    found = check_law(tmp_path / "run")
    if policy == "sync":
        assert found["staleness"]["effective"] == 0.0
        assert found["multi_version_share"] == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--env", "pace/Shp-v0"], "pace/Shop-v0"),
        (["--pool.polcy", "sync"], "pool.policy"),
        (["--pool.batch_size", "18"], "rollout.group_size"),
        (["--run-dir", "/proc/nothing"], "/proc/nothing"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["train", "--run-dir", str(tmp_path / "run"), *SMALL, *options]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_chat_template_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shipped_folder(), folder)
    (folder / "chat_template.jinja").unlink()
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--model", str(folder)]) == 2
    assert "chat template" in capsys.readouterr().err


def start(run: Path, *options: str) -> "subprocess.Popen[str]":
    """The command in a process of its own, with the engine in another."""
    return subprocess.Popen(
        [sys.executable, "-m", "pace_agent", "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    """Read the output up to the line of `step`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"the run ended before step {step}: exit code {process.wait()}")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds (a zombie has ended)."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_killed_and_resumed_it_trains_nothing_twice(tmp_path: Path) -> None:
    """SIGKILL at a random step, resume, then Ctrl-C, resume again to the end."""
    run = tmp_path / "run"
    process = start(run, "--run-dir", str(run), *SMALL, "--trainer.max_steps", "12")
    try:
        wait_for_step(process, random.randint(3, 5))
        engine = children(process.pid)
        process.kill()
        process.wait()
        assert engine
        assert all(gone(child) for child in engine)

        process = start(run, "--resume", str(run))
        wait_for_step(process, 7)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait() == 0
        assert f"pace-agent train --resume {run}" in rest
        done = check_law(run)["steps"]
        assert 7 <= done <= 9

        process = start(run, "--resume", str(run))
        output, _ = process.communicate()
        assert process.returncode == 0, output
        found = check_law(run)
        assert found["steps"] == 12
        assert found["incarnation"] == 2
        assert (run / "rolled_back").is_dir()
    finally:
        process.kill()
        process.wait()


def test_a_run_of_another_config_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert main(["config", "show"]) == 0
    (run / "config.toml").write_text(capsys.readouterr().out)
    assert main(["train", "--resume", str(run), "--rollout.group_size", "4"]) == 2
    assert "rollout.group_size" in capsys.readouterr().err
