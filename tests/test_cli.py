import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pace_agent
from pace_agent.cli import main
from pace_agent.cli.configs import eval_config, resumed_config, write_config
from pace_agent.config import RunConfig, load_config
from pace_agent.errors import EngineError, RunError, UserError


def run(*arguments: str) -> int:
    """The exit code of a command."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "command", ["train", "eval", "rollout", "env list", "sandbox check", "sandbox run", "config show", "version"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    assert f"Usage: pace-agent {command}" in capsys.readouterr().out


def test_config_show_is_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--pool.policy", "unfiltered", "--seed", "5") == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    config = load_config(file)
    assert config == load_config(None, ["--pool.policy", "unfiltered", "--seed", "5"])
    assert run("config", "show", "--config", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["pool"]["policy"] == "unfiltered"


def test_config_show_without_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--no-comments", "--trainer.max_steps=7") == 0
    shown = capsys.readouterr().out
    assert "max_steps = 7" in shown
    assert not [line for line in shown.splitlines() if line.startswith("# ") and "=" not in line]


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACE_AGENT_POOL__POLICY", "sync")
    assert run("config", "show", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pool"]["policy"] == "sync"


def test_bad_input_is_exit_code_2_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--pool.polcy", "x") == 2
    captured = capsys.readouterr()
    assert captured.err == "error: unknown key 'pool.polcy' (--pool.polcy). Did you mean 'pool.policy'?\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--trainer.lerning_rate", "1", "Did you mean 'learning_rate'?"),
        ("--trainer.loss_type", "grop", "Did you mean 'grpo'?"),
        ("--trainer.use_vllm", "true", "trainer.use_vllm has no effect here"),
    ],
)
def test_a_wrong_option_of_trl_is_found(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", option, value) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("bogus",), ("eval",), ("eval", "embedded", "-n", "0"), ("env", "list", "x")])
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Usage: pace-agent" in capsys.readouterr().err


def test_env_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "list", "--json") == 0
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)["environments"]}
    assert found["pace/Shop-v0"]["tools"] == ["price", "calculator"]
    assert found["pace/Shop-v0"]["error"] == ""
    assert run("env", "list") == 0
    assert "pace/Shop-v0" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"pace-agent {pace_agent.__version__}\n"


def test_python_dash_m(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pace_agent", "config", "show", "--nope", "1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(pace_agent.__file__).parent.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown key 'nope'")


# The boundary: what a command raises, and what the shell sees


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such folder"), 2, "error: no such folder"),
        (RunError("too many failures"), 1, "error: too many failures"),
        (EngineError("out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "pace_agent.cli.train", SimpleNamespace(run=fail))
    assert run("train") == code
    assert capsys.readouterr().err.strip() == said


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(sys.modules, "pace_agent.cli.train", SimpleNamespace(run=fail))
    with pytest.raises(ZeroDivisionError):
        run("train")


# What commands hand on


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder / "config.toml", load_config(None, ["--env", "a:B", "--rollout.max_turns", "3", "--seed", "4"]))
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = SimpleNamespace(run=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "pace_agent.cli.train", module)
    return calls


def test_train_hands_on_the_config(trained: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[pool]\nbeta = 0.5\n")
    assert run("train", "--config", str(file), "--pool.policy", "sync", "--model", "m", "--run-dir=out") == 0
    [(config, resume)] = trained
    assert (config.pool.beta, config.pool.policy, config.model.path, config.run.dir) == (0.5, "sync", "m", Path("out"))
    assert resume is None


def test_train_resumes_with_the_runs_own_config(trained: list[tuple[Any, ...]], run_folder: Path) -> None:
    assert run("train", "--resume", str(run_folder), "--trainer.max_steps", "200") == 0
    [(config, resume)] = trained
    assert (config.env.id, config.run.seed, config.trainer["max_steps"]) == ("a:B", 4, 200)
    assert config.run.dir == resume == run_folder


def test_resume_with_another_config_is_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--resume", str(run_folder), "--env", "pace/Shop-v0") == 2
    assert "env.id: 'a:B' in the run folder, 'pace/Shop-v0' now" in capsys.readouterr().err


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder, it has no config\.toml"):
        resumed_config(tmp_path, None, [], {})


def test_eval_uses_the_runs_own_config(run_folder: Path) -> None:
    config = eval_config(str(run_folder), None, [], {})
    assert (config.env.id, config.rollout.max_turns) == ("a:B", 3)
    assert eval_config(str(run_folder), "c:D", [], {}).env.id == "c:D"


def test_eval_of_a_model_uses_the_defaults() -> None:
    assert eval_config("embedded", None, [], {}) == RunConfig()
    assert eval_config("folder", None, ["--rollout.max_turns", "2"], {}).model.path == "folder"


def test_settings_before_the_folder_are_refused() -> None:
    with pytest.raises(UserError, match="settings come after the folder"):
        eval_config("--rollout.max_turns", None, ["3", "embedded"], {})
