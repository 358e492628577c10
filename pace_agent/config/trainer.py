"""TRL's options: the defaults of the embedded job, and the few that the rest of the config decides.

Every other name goes to the trainer's config as it stands, which knows TRL's names and checks them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

if TYPE_CHECKING:
    from pace_agent.config.models import RunConfig

DEFAULTS: Mapping[str, Any] = {
    "max_steps": 120,
    "learning_rate": 4e-4,
    # Without lr_scheduler_kwargs of your own this falls linearly to a tenth: see `trainer_options`.
    "lr_scheduler_type": "polynomial",
    "warmup_steps": 5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
}

LARGEST_MICRO_BATCH = 16
"""Sequences of one forward pass where `per_device_train_batch_size` is not set: more takes longer on a CPU, with
more padding and more memory."""

DECIDED_ELSEWHERE: Mapping[str, str] = {
    "output_dir": "run.dir",
    "seed": "run.seed",
    "report_to": "run.report_to",
    "logging_steps": "run.log_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "temperature": "rollout.temperature",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "gradient_accumulation_steps": "pool.batch_size (over trainer.per_device_train_batch_size)",
    "generation_batch_size": "pool.batch_size",
    "steps_per_generation": "pool.batch_size",
}
"""TRL options that would contradict a key of ours, and that key."""


def with_defaults(options: Any) -> Any:
    """`options` over DEFAULTS; ValueError for one that another key decides."""
    if not isinstance(options, Mapping):
        return options
    for name, value in options.items():
        if name in DECIDED_ELSEWHERE:
            raise ValueError(f"trainer.{name} is decided by {DECIDED_ELSEWHERE[name]}; set that instead")
        _check_number(name, value)
    return {**DEFAULTS, **options}


def _check_number(name: str, value: Any) -> None:
    """Refuse what is not a number where our default is one: the rest is TRL's to judge, but later."""
    default = 1 if name == "per_device_train_batch_size" else DEFAULTS.get(name)
    if isinstance(default, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"trainer.{name} = {value!r}: must be a number")
    if isinstance(default, int) and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"trainer.{name} = {value!r}: must be an integer")
    lowest = 1 if name in ("max_steps", "per_device_train_batch_size") else 0
    if isinstance(default, int | float) and not value >= lowest:
        raise ValueError(f"trainer.{name} = {value!r}: must be at least {lowest}")


TrainerOptions = Annotated[dict[str, Any], BeforeValidator(with_defaults)]


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def trainer_options(config: "RunConfig") -> dict[str, Any]:
    """Keyword arguments for TRL's config: `config.trainer`, and what other keys decide. The caller adds `output_dir`.

    The word "none" stands for None. A `polynomial` schedule without an end falls to a tenth of the learning rate:
    TRL's own default end is next to zero, and the last steps would teach nothing.
    """
    batch = config.pool.batch_size
    micro = max(divisor for divisor in divisors(batch) if divisor <= LARGEST_MICRO_BATCH)
    options: dict[str, Any] = {"per_device_train_batch_size": micro, **config.trainer}
    options = {key: None if value == "none" else value for key, value in options.items()}
    # A warm-up as long as the run leaves nothing to fall, and TRL's schedule divides by that.
    options["warmup_steps"] = min(options["warmup_steps"], options["max_steps"] - 1)
    if options["lr_scheduler_type"] == "polynomial":
        end = {"lr_end": options["learning_rate"] / 10, "power": 1.0}
        options["lr_scheduler_kwargs"] = {**end, **(options.get("lr_scheduler_kwargs") or {})}
    return {
        **options,
        "seed": config.run.seed,
        "report_to": list(config.run.report_to),
        "logging_steps": config.run.log_every,
        "temperature": config.rollout.temperature,
        "num_generations": config.rollout.group_size,
        "gradient_accumulation_steps": batch // options["per_device_train_batch_size"],
    }
