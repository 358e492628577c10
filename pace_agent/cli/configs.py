"""From a command's options to the configuration that it works with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pace_agent.config import RunConfig, check_resume, dump_toml, load_config, trainer_options
from pace_agent.config.trainer import DEFAULTS
from pace_agent.errors import UserError


def read_config(file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The config of a new run, TRL's option names checked too."""
    config = load_config(file, overrides, environ)
    _check_trainer(config)
    return config


def resumed_config(run_dir: Path, file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The config to go on with: the run's own, or `file` in its place, with `overrides`.

    UserError when the folder holds no run, or when the new config can't go on from the old one.
    """
    kept = run_dir / "config.toml"
    if not kept.is_file():
        raise UserError(f"--resume {run_dir}: this is no run folder, it has no config.toml")
    old = load_config(kept)
    new = read_config(file or kept, overrides, environ)
    check_resume(old, new)
    return new.model_copy(update={"run": new.run.model_copy(update={"dir": run_dir})})


def eval_config(target: str, env: str | None, overrides: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The config to play with: that of the run folder `target`, or the defaults with `target` as the model."""
    if target.startswith("-"):
        raise UserError(f"{target!r} is not a run or model folder; settings come after the folder")
    kept = Path(target) / "config.toml"
    chosen = [*(["--env", env] if env else []), *overrides]
    if kept.is_file():
        return load_config(kept, chosen, environ)
    return load_config(None, ["--model", target, *chosen], environ)


def _check_trainer(config: RunConfig) -> None:
    """Let TRL judge its options before anything is made, but only where one needs it: loading TRL takes seconds.

    Our own defaults are known to be right, and so are the numbers that replaced their numbers.
    """
    foreign = [
        name
        for name, value in config.trainer.items()
        if name not in DEFAULTS or (isinstance(DEFAULTS[name], str) and value != DEFAULTS[name])
    ]
    if not foreign:
        return
    from pace_agent.trainers.pace_config import build_config

    build_config(trainer_options(config), output_dir=config.run.dir or "runs")


def write_config(path: Path, config: RunConfig) -> None:
    """Keep the resolved config in a run folder."""
    from pace_agent.report.files import write_atomic

    write_atomic(path, dump_toml(config, comments=True))
