import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_agent.config import (
    RunConfig,
    build_config,
    check_resume,
    config_fingerprint,
    dump_toml,
    load_config,
    trainer_options,
)
from pace_agent.config.keys import FIELDS
from pace_agent.config.toml import toml_value
from pace_agent.errors import UserError


def refusal(*overrides: str, file: Path | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides, environ)
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Sources


def test_later_sources_win(tmp_path: Path) -> None:
    file = written(tmp_path, "[pool]\nbins = 2\neta = 2\nmax_staleness = 2\n")
    environ = {"PACE_AGENT_POOL__ETA": "3", "PACE_AGENT_POOL__MAX_STALENESS": "3"}
    config = load_config(file, ["--pool.max_staleness", "5"], environ)
    assert (config.pool.bins, config.pool.eta, config.pool.max_staleness) == (2, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--model", "./my-model"], "model.path", "./my-model"),
        (["--model=42"], "model.path", "42"),
        (["--env", "acme/Dice-v0"], "env.id", "acme/Dice-v0"),
        (["--seed", "3"], "run.seed", 3),
        (["--run-dir", "out"], "run.dir", Path("out")),
        (["--rollout.max-turns=7"], "rollout.max_turns", 7),
        (["--sandbox.unsafe"], "sandbox.unsafe", True),
        (["--engine.process", "False"], "engine.process", False),
        (["--pool.lam", "2"], "pool.lam", 2),
        (["--rollout.max_context", "none"], "rollout.max_context", None),
        (["--run.report_to", "trackio, wandb"], "run.report_to", ["trackio", "wandb"]),
        (["--run.report_to", '["trackio"]'], "run.report_to", ["trackio"]),
        (["--env.tasks", "tasks.jsonl"], "env.tasks", "tasks.jsonl"),
        (["--pool.beta", "0.5", "--pool.beta", "0.25"], "pool.beta", 0.25),
        (["--sglang.gpus", "0, 1", "--sglang.servers", "2"], "sglang.gpus", [0, 1]),
        (["--sglang.gpus", "3"], "sglang.gpus", [3]),
        (
            ["--sglang.urls", "http://a:1/,http://b:1", "--sglang.update", "group"],
            "sglang.urls",
            ["http://a:1", "http://b:1"],
        ),
        (["--sglang.args=--dp-size,2"], "sglang.args", ["--dp-size", "2"]),
        (["--sglang.colocate"], "sglang.colocate", True),
    ],
)
def test_command_line(arguments: list[str], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(load_config(None, arguments), section), name) == value


def test_free_tables_take_any_key_and_merge(tmp_path: Path) -> None:
    file = written(tmp_path, "[env.kwargs]\nlevel = 1\nshop = { open = true }\n[trainer]\nloss_type = 'grpo'\n")
    arguments = ["--env.kwargs.level", "2", "--env.kwargs.shop.items", "[1, 2]", "--trainer.use_liger_kernel"]
    config = load_config(file, arguments)
    assert config.env.kwargs == {"level": 2, "shop": {"open": True, "items": [1, 2]}}
    assert config.trainer["loss_type"] == "grpo"
    assert config.trainer["use_liger_kernel"] is True
    assert config.trainer["epsilon_high"] == 0.28


def test_foreign_environment_variables_are_left_alone() -> None:
    foreign = ("PACE_AGENT_CACHE", "PACE_AGENT_SGLANG_PYTHON", "PATH")
    assert load_config(None, [], dict.fromkeys(foreign, "x")) == RunConfig()


# Errors name the key, where it was written, and what is allowed


def test_unknown_key_in_a_file_names_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, "[pool]\nbins = 4\n\n[rollout]\ngroupsize = 4\n")
    assert refusal(file=file) == (
        f"unknown key 'rollout.groupsize' ({file}, line 5). Did you mean 'rollout.group_size'?"
    )


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--pool.polcy", "pool.policy"),
        ("--rollout.batch_size", "pool.batch_size"),
        ("--batch-size", "pool.batch_size"),
        ("--learning_rate", "trainer.learning_rate"),
        ("--modl", "model.path"),
        ("--sed", "run.seed"),
    ],
)
def test_unknown_option_names_the_closest(argument: str, meant: str) -> None:
    said = refusal(argument, "1")
    assert argument in said
    assert f"Did you mean '{meant}'" in said


def test_unknown_environment_variable() -> None:
    said = refusal(environ={"PACE_AGENT_POOL__POLCY": "pace"})
    assert "environment variable PACE_AGENT_POOL__POLCY" in said
    assert "Did you mean 'pool.policy'?" in said


def test_one_underscore_in_an_environment_variable_is_not_ignored() -> None:
    assert "PACE_AGENT_POOL__POLICY" in refusal(environ={"PACE_AGENT_POOL_POLICY": "sync"})


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "[pool]\npolcy = 'pace'\nbeta = 'much'\n[engine]\nslots = 0\n")
    said = refusal(file=file)
    assert all(part in said for part in ("pool.polcy", "pool.beta = 'much'", "engine.slots = 0"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--pool.policy", "pac"], ["pool.policy = 'pac'", "--pool.policy", "Did you mean 'pace'?"]),
        (["--rollout.top_p", "1.5"], ["rollout.top_p = 1.5", "less than or equal to 1"]),
        (["--pool.beta", "nan"], ["pool.beta = nan", "finite"]),
        (["--engine.slots", "many"], ["engine.slots = 'many'", "integer"]),
        (["--engine.slots", "12.5"], ["engine.slots = 12.5", "integer"]),
        (["--engine.slots", "true"], ["engine.slots = True", "integer"]),
        (["--engine.process", "1"], ["engine.process = 1", "boolean"]),
        (["--engine.slots"], ["--engine.slots needs a value"]),
        (["--pool", "3"], ["'pool'", "pool.NAME"]),
        (["pool.beta=1"], ["unexpected argument 'pool.beta=1'"]),
        (["--pool.batch_size", "100"], ["pool.batch_size = 100", "rollout.group_size = 8", "96 and 104"]),
        (["--pool.batch_size", "5"], ["closest: 8"]),
        (["--pool.target", "32"], ["pool.target = 32", "lowest is 64"]),
        (["--pool.capacity", "32"], ["pool.capacity = 32", "lowest is 64"]),
        (["--pool.target", "200", "--pool.capacity", "199"], ["lowest is 200"]),
        (["--pool.unit", "group", "--pool.target", "130"], ["pool.target = 130", "128 and 136"]),
        (["--sandbox.backend", "subprocess"], ["sandbox.backend", "sandbox.unsafe"]),
        (["--engine.kind", "slang"], ["Did you mean 'sglang'?"]),
        (["--sglang.gpus", "0,0", "--sglang.servers", "2"], ["sglang.gpus = [0, 0]", "names 0 more than once"]),
        (["--sglang.gpus", "0,1,2", "--sglang.servers", "2"], ["are 3", "sglang.servers = 2", "needs 2"]),
        (["--sglang.gpus", "one"], ["sglang.gpus", "integer"]),
        (["--sglang.gpus", "-1"], ["sglang.gpus", "greater than or equal to 0"]),
        (["--sglang.port", "65535", "--sglang.servers", "2"], ["sglang.port = 65535", "no room"]),
        (["--sglang.urls", "http://localhost:1,http://localhost:1/"], ["http://localhost:1 more than once"]),
        (["--sglang.urls", "http://localhost:1", "--sglang.servers", "2"], ["sglang.servers = 2", "sglang.urls"]),
        (["--sglang.urls", "http://localhost:1", "--sglang.gpus", "0"], ["sglang.gpus = [0]", "sglang.urls"]),
        (["--sglang.urls", "http://localhost:1", "--sglang.args=-x"], ["sglang.args = ['-x']", "sglang.urls"]),
        (["--sglang.router_url", "http://localhost:1"], ["sglang.router_url", "needs sglang.urls"]),
        (["--sglang.urls", "http://far:1"], ['sglang.update = "disk"', "sglang.weights_dir", "http://far:1"]),
        (["--sglang.urls", "http://far:1", "--sglang.update", "tensor"], ["http://far:1 is not on this machine"]),
        (
            ["--sglang.urls", "http://far:1", "--sglang.colocate", "--pool.policy", "sync"],
            ["sglang.colocate = true", "http://far:1"],
        ),
        (["--sglang.colocate", "--engine.kind", "sglang"], ["pool.policy = 'pace'", "sync"]),
        (["--sglang.api_key_env", "sk-123"], ["name environment variables"]),
        (["--trainer.seed", "1"], ["trainer.seed", "run.seed"]),
        (["--trainer.max_steps", "0"], ["trainer.max_steps = 0", "at least 1"]),
        (["--trainer.learning_rate", "fast"], ["trainer.learning_rate = 'fast'", "number"]),
        (["--trainer.per_device_train_batch_size", "48"], ["does not divide", "closest that does is"]),
    ],
)
def test_wrong_value(arguments: list[str], parts: list[str]) -> None:
    said = refusal(*arguments)
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pool = 3\n", "must be a table, written as [pool]"),
        ("[pool]\nbeta = '1'\n", "pool.beta = '1'"),
        ("[pool\n", "not valid TOML"),
        ("trainer = 3\n", "trainer = 3"),
        ("seed = 3\n", "Did you mean 'run.seed'?"),
        ("[run]\nreport_to = 'wandb'\n", "run.report_to = 'wandb'"),
    ],
)
def test_wrong_file(text: str, part: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    said = refusal(file=file)
    assert part in said
    assert str(file) in said


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(file=tmp_path / "no.toml")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:1",
        "ftp://a:1",
        "http://",
        "http://a:1/v1",
        "http://a:1?x",
        "http://a:b",
        "http://a b",
    ],
)
def test_what_is_no_address_of_a_server(url: str) -> None:
    said = refusal("--sglang.urls", url)
    assert f"sglang.urls: {url!r}" in said
    assert "http://HOST:PORT" in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8", "https://localhost:443"])
def test_servers_on_this_machine_may_share_memory(url: str) -> None:
    arguments = ["--engine.kind", "sglang", "--sglang.urls", url, "--sglang.update", "tensor", "--pool.policy", "sync"]
    assert load_config(None, [*arguments, "--sglang.colocate"]).sglang.urls == [url]


def test_far_servers_need_a_folder_that_they_see() -> None:
    config = load_config(None, ["--sglang.urls", "http://far:1", "--sglang.weights_dir", "/shared"])
    assert config.sglang.weights_dir == Path("/shared")


def test_a_key_given_for_the_name_of_its_variable_is_not_shown() -> None:
    assert "s3cret-key" not in refusal("--sglang.api_key_env", "s3cret-key")


def test_the_local_engine_leaves_the_servers_settings_alone() -> None:
    assert load_config(None, ["--sglang.colocate", "--sglang.servers", "4"]).engine.kind == "local"


# Writing


def test_the_default_config_reads_back(tmp_path: Path) -> None:
    for comments in (False, True):
        assert load_config(written(tmp_path, dump_toml(RunConfig(), comments=comments))) == RunConfig()


def test_a_changed_config_reads_back(tmp_path: Path) -> None:
    config = build_config(
        {
            "env": {
                "id": "a:B",
                "kwargs": {"odd key": [1, 2.5, 'ü"\\\n\x7f'], "deep": {"x": True}},
                "tasks": "t.jsonl",
            },
            "rollout": {"max_context": None, "max_seconds": None, "max_tool_calls": 0},
            "pool": {"target": 200, "capacity": 512, "lam": 0.1},
            "engine": {"kind": "sglang"},
            "sglang": {"gpus": [0, 1], "servers": 2, "args": ["--dp-size", "1"], "weights_dir": Path("/w"), "port": 1},
            "trainer": {"learning_rate": 1e-5, "lr_scheduler_kwargs": {"power": 2.0}, "max_grad_norm": 1},
            "run": {"dir": Path("runs/x"), "report_to": ["trackio"]},
        }
    )
    assert load_config(written(tmp_path, dump_toml(config, comments=True))) == config


json_like = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(json_like)
def test_any_value_reads_back(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_what_toml_can_not_say_is_refused() -> None:
    with pytest.raises(UserError, match="can't be kept"):
        toml_value({1, 2})


def test_every_key_says_what_it_is_for() -> None:
    assert [key for key, field in FIELDS.items() if not field.description] == []


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().pool.beta = 2.0


# The trainer's options


def test_trainer_options_follow_the_config() -> None:
    config = load_config(None, ["--pool.batch_size", "48", "--seed", "3", "--trainer.learning_rate", "1e-5"])
    options = trainer_options(config)
    assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] == 48
    assert options["per_device_train_batch_size"] <= 32
    assert options["num_generations"] == 8
    assert options["seed"] == 3
    assert options["lr_scheduler_kwargs"] == {"lr_end": pytest.approx(1e-6), "power": 1.0}


def test_trainer_options_are_the_users_where_they_are_set() -> None:
    arguments = ["--trainer.lr_scheduler_type", "constant", "--trainer.optim_args", "none"]
    options = trainer_options(load_config(None, arguments))
    assert options["lr_scheduler_type"] == "constant"
    assert "lr_scheduler_kwargs" not in options
    assert options["optim_args"] is None


# Resuming


def test_what_may_change_on_resume() -> None:
    old = load_config()
    new = load_config(None, ["--trainer.max_steps", "500", "--rollout.concurrency", "8", "--run-dir", "x"])
    check_resume(old, new)
    assert config_fingerprint(old) == config_fingerprint(new)


def test_what_may_not_change_on_resume() -> None:
    old, new = load_config(), load_config(None, ["--env", "a:B", "--rollout.group_size", "4"])
    with pytest.raises(UserError) as caught:
        check_resume(old, new)
    said = str(caught.value)
    assert "env.id: 'pace/Shop-v0' in the run folder, 'a:B' now" in said
    assert "rollout.group_size: 8 in the run folder, 4 now" in said
    assert "pool.batch_size" not in said
    assert config_fingerprint(old) != config_fingerprint(new)


def test_a_password_in_an_address_is_not_repeated() -> None:
    assert "can't hold a user or password" in (said := refusal("--sglang.urls", "http://me:hunter2@a:1"))
    assert "hunter2" not in said


def test_the_warm_up_leaves_a_step() -> None:
    """A schedule whose warm-up is as long as the run divides by zero at its end."""
    for steps, warm_up in ((1, 0), (5, 4), (6, 5), (120, 5)):
        assert trainer_options(load_config(None, ["--trainer.max_steps", str(steps)]))["warmup_steps"] == warm_up
