"""The commands. Each one reads its options and calls the module that does the work, which is loaded only then."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pace_agent import __version__
from pace_agent.cli.configs import eval_config, read_config, resumed_config

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Commands that take `--section.key value` for any key of the configuration."""

PASSED_ON = "pace_agent.passed_on"

SETTINGS_HELP = (
    "Any setting can follow as [bold]--section.key VALUE[/]. "
    "[bold]pace-agent config show[/] lists them all with what they mean."
)

app = typer.Typer(
    name="pace-agent",
    help="Train language models that use tools, by asynchronous reinforcement learning.",
    epilog="Start with [bold]pace-agent train[/]: it trains a small model on two CPU cores in a few minutes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
env_app = typer.Typer(help="Environments: what there is to learn.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)
sandbox_app = typer.Typer(help="Where code that a model wrote runs.", no_args_is_help=True)
app.add_typer(env_app, name="env")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="A TOML file with settings.", show_default=False)
]
EnvId = Annotated[
    str | None,
    typer.Option("--env", metavar="ID", help="An id from `env list`, or module:Class.", show_default=False),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the likeliest token.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command(context_settings=SETTINGS, epilog=SETTINGS_HELP)
def train(
    context: typer.Context,
    config: ConfigFile = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on from the last checkpoint of this run.", show_default=False),
    ] = None,
) -> None:
    """Train a model on an environment.

    Without options: the small model that comes along learns [bold]pace/Shop-v0[/], on two CPU cores.

    [dim]pace-agent train --seed 1
    pace-agent train --env pace/MathPython-v0 --model ./my-model
    pace-agent train --config run.toml --pool.policy unfiltered --trainer.learning_rate 1e-5
    pace-agent train --resume runs/Shop-v0-20260101-120000[/]

    Short forms: [bold]--model PATH[/], [bold]--env ID[/], [bold]--seed N[/], [bold]--run-dir DIR[/].
    Environment variables work too: PACE_AGENT_POOL__POLICY sets [bold]--pool.policy[/].
    The command line wins over the environment, and that over the file.
    """
    if resume is None:
        settings = read_config(config, context.args, os.environ)
    else:
        settings = resumed_config(resume, config, context.args, os.environ)
    from pace_agent.cli.train import run

    run(settings, resume)


@app.command("eval", context_settings=SETTINGS, epilog=SETTINGS_HELP)
def evaluate(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model folder, or `embedded`.", show_default=False),
    ],
    env: EnvId = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Rollouts of each task.")] = 4,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks, none of which training ever draws.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    temperature: Temperature = 1.0,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out tasks.

    Prints the mean reward with its interval, pass@k, the truncated share, and what failed.
    A run folder is evaluated on its own environment unless [bold]--env[/] names another.

    [dim]pace-agent eval embedded --env pace/Shop-v0
    pace-agent eval runs/Shop-v0-20260101-120000 -n 8 --tasks 100 --json[/]
    """
    settings = eval_config(target, env, context.args, os.environ)
    from pace_agent.cli.evaluate import run

    run(target, settings, n=n, tasks=tasks, seed=seed, temperature=temperature, as_json=as_json)


@app.command(context_settings=SETTINGS, epilog=SETTINGS_HELP)
def rollout(
    context: typer.Context,
    env: EnvId = None,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A run folder, a model folder, or `embedded`.")
    ] = "embedded",
    seed: Annotated[int, typer.Option(min=0, help="Chooses the task and the sampling.")] = 0,
    temperature: Temperature = 1.0,
) -> None:
    """Play one episode and print it, turn by turn.

    [dim]pace-agent rollout --env pace/Shop-v0 --seed 7
    pace-agent rollout --env my_module:MyEnv --model runs/Shop-v0-20260101-120000[/]
    """
    settings = eval_config(model, env, context.args, os.environ)
    from pace_agent.cli.rollout import run

    run(model, settings, seed=seed, temperature=temperature)


class PassingOn(TyperCommand):
    """A command that leaves everything after `--` alone, for another program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[PASSED_ON] = args[cut + 1 :]
        return super().parse_args(ctx, args[:cut])


@app.command(cls=PassingOn, context_settings=SETTINGS, epilog=SETTINGS_HELP)
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a run folder, or `embedded`.", show_default=False),
    ],
    config: ConfigFile = None,
    servers: Annotated[
        int | None, typer.Option(metavar="N", help="How many to start; by default one.", show_default=False)
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Their GPUs, such as 0,1.", show_default=False)
    ] = None,
    tp: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs of each server; by default one.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cuda (the default) or cpu.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Of the first server; by default any free one.", show_default=False)
    ] = None,
    router: Annotated[
        str | None, typer.Option(metavar="NAME", help="sglang-router or smg, in front of them.", show_default=False)
    ] = None,
) -> None:
    """Start SGLang servers for a model, and keep them running until Ctrl-C.

    They listen on this machine alone, with keys. What follows [bold]--[/] goes to SGLang.

    [dim]pace-agent serve ./my-model --gpus 1,2 --tp 2
    pace-agent serve embedded --device cpu
    pace-agent serve ./my-model --servers 2 --router smg -- --mem-fraction-static 0.8[/]
    """
    from pace_agent.cli.serve import run, serve_settings

    own = serve_settings(servers, gpus, tp, device, port, router, context.meta[PASSED_ON])
    run(model, read_config(config, [*own, *context.args], os.environ))


@app.command()
def simulate(
    ratio: Annotated[
        float | None,
        typer.Option(help="Rollouts produced over rollouts consumed; by default 1.5.", show_default=False),
    ] = None,
    slots: Annotated[int, typer.Option(help="Rollouts that sample at the same time.")] = 256,
    batch: Annotated[int, typer.Option(help="Rollouts that a trainer step takes.")] = 64,
    target: Annotated[
        int | None, typer.Option(help="Rollouts the pool may hold; by default a batch.", show_default=False)
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="Waiting rollouts at which none starts; by default 8 batches.", show_default=False),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="LIST", help="Such as sync,pace-length; by default all.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Trainer steps; the first quarter is warm-up.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, speeds and stalls.")] = 0,
    mean_length: Annotated[float, typer.Option(help="Tokens of a rollout, on average.")] = 1000.0,
    token_seconds: Annotated[float, typer.Option(help="Of one token, in a slot at full speed.")] = 0.02,
    step_seconds: Annotated[
        float | None, typer.Option(help="Of a trainer step, instead of --ratio.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a PNG.", show_default=False)] = None,
) -> None:
    """Compare the policies of the pool without a model.

    Rollouts have drawn lengths, speeds and tool stalls; the pool is the one that training uses.
    Prints throughput, staleness, waste and length bias of each policy.

    [dim]pace-agent simulate --ratio 1.2
    pace-agent simulate --slots 512 --policies bounded_admission,pace-length --figure pool.png[/]
    """
    from pace_agent.cli.simulate import given_workload, run

    run(
        given_workload(ratio, step_seconds, slots=slots, mean_length=mean_length, token_seconds=token_seconds),
        policies=policies,
        pool={"batch_size": batch, "target": target, "capacity": capacity},
        steps=steps,
        seed=seed,
        step_seconds=step_seconds,
        as_json=as_json,
        figure=figure,
    )


@env_app.command("list")
def env_list(as_json: AsJson = False) -> None:
    """List the environments that can be named here, installed ones of others too."""
    from pace_agent.cli.environments import print_environments

    print_environments(as_json=as_json)


@sandbox_app.command("check", context_settings=SETTINGS, epilog=SETTINGS_HELP)
def sandbox_check(
    context: typer.Context,
    config: ConfigFile = None,
    quick: Annotated[bool, typer.Option(help="Only whether they work, without the attacks.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every attack, not only what got through.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which backends work here, and attack each from inside to see what it contains.

    Ends with status 1 if none works that isolates, or if an attack gets through.

    [dim]pace-agent sandbox check --all
    pace-agent sandbox check --sandbox.backend docker --sandbox.runtime runsc[/]
    """
    section = read_config(config, context.args, os.environ).sandbox
    from pace_agent.cli.sandbox import check_backends

    raise typer.Exit(check_backends(section, quick=quick, everything=everything, as_json=as_json))


@sandbox_app.command("run", context_settings=SETTINGS, epilog=SETTINGS_HELP)
def sandbox_run(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Python; - for standard input.", show_default=False)],
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a Python file in a sandbox, with the limits that a model's code would have.

    Standard input, read to its end first, goes to it. Its exit status comes back; or 124 after the time-out, 125 if
    there is no sandbox, 137 out of memory, 141 for too much output, 128 and the signal's number if one ended it.

    [dim]pace-agent sandbox run solve.py
    echo 7 | pace-agent sandbox run solve.py --sandbox.timeout 2 --sandbox.backend docker[/]
    """
    section = read_config(config, context.args, os.environ).sandbox
    from pace_agent.cli.sandbox import run_file

    raise typer.Exit(run_file(file, section, as_json=as_json))


@config_app.command("show", context_settings=SETTINGS)
def config_show(
    context: typer.Context,
    config: ConfigFile = None,
    as_json: AsJson = False,
    comments: Annotated[bool, typer.Option(help="Say above each key what it is for.")] = True,
) -> None:
    """Print the configuration that `train` would run with, as TOML.

    It takes what [bold]train[/] takes, and what it prints is a valid [bold]--config[/] file.

    [dim]pace-agent config show > run.toml
    pace-agent config show --config run.toml --pool.policy sync --no-comments[/]
    """
    settings = read_config(config, context.args, os.environ)
    if as_json:
        typer.echo(json.dumps(settings.model_dump(mode="json"), indent=2))
        return
    from pace_agent.config import dump_toml

    typer.echo(dump_toml(settings, comments=comments), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"pace-agent {__version__}")
