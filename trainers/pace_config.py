"""TRL's `GRPOConfig` with the defaults of asynchronous training, and a few fields of our own.

Loading this module loads TRL, which takes seconds: import it only where a trainer is made.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from trl.trainer.grpo_config import GRPOConfig

from pace_agent.errors import UserError, did_you_mean

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "correction": ("none", "truncated_is", "decoupled"),
    "correction_level": ("token", "turn", "sequence"),
}

ENGINE = "the engine generates, under the rollout's settings"
GROUPS = "advantages are computed when a group of rollouts is complete"
PER_STEP = "a drawn batch is one optimiser step"
FED = "batches come from the pool, one at a time"
NOT_USED: Mapping[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"), ENGINE),
    **dict.fromkeys(("cache_implementation", "chat_template_kwargs", "max_tool_calling_iterations"), ENGINE),
    **dict.fromkeys(("use_transformers_continuous_batching", "use_transformers_paged"), ENGINE),
    **dict.fromkeys(("transformers_continuous_batching_config", "mask_truncated_completions"), ENGINE),
    **dict.fromkeys(("reward_weights", "multi_objective_aggregation", "scale_rewards"), GROUPS),
    **dict.fromkeys(("num_iterations", "steps_per_generation", "generation_batch_size"), PER_STEP),
    **dict.fromkeys(("num_train_epochs", "auto_find_batch_size"), PER_STEP),
    **dict.fromkeys(("shuffle_dataset", "remove_unused_columns", "ignore_data_skip", "train_sampling_strategy"), FED),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_drop_last"), FED),
    **dict.fromkeys(("dataloader_persistent_workers", "accelerator_config", "data_seed"), FED),
    **dict.fromkeys(("do_eval", "eval_strategy", "eval_steps", "eval_on_start"), "rollouts evaluate, not a dataset"),
    **dict.fromkeys(("num_generations_eval", "per_device_eval_batch_size"), "rollouts evaluate, not a dataset"),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), "the best model is kept by its evaluation"),
    **dict.fromkeys(("log_completions", "log_completions_hub_repo"), "every trajectory is kept in the run folder"),
    "model_init_kwargs": "the model is loaded before the trainer is made",
    "resume_from_checkpoint": "a run is resumed from its folder",
    "save_only_model": "a run could not be resumed from such a checkpoint",
}
"""TRL's options that would have no effect here or break what holds, and why."""


@dataclass
class PaceConfig(GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` for batches that come from the pool. Fields of our own begin with `correction`."""

    # One record of metrics per step; whoever wants fewer says so.
    logging_steps: float = field(default=1)
    disable_tqdm: bool | None = field(default=True)
    save_steps: float = field(default=20)
    save_total_limit: int | None = field(default=2)
    # float32 as in the engine: under autocast the ratio of identical weights would not be 1.
    bf16: bool | None = field(default=False)
    use_cpu: bool = field(default_factory=lambda: not torch.cuda.is_available())
    # None and not False: setting the old name at all is deprecated where the new one exists.
    gradient_checkpointing: bool | None = field(default=None)
    # The engine samples without dropout, so scoring with it would spoil every ratio.
    disable_dropout: bool = field(default=True)
    beta: float = field(default=0.0)
    # A resumed run must not draw batches only to skip them.
    ignore_data_skip: bool = field(default=True)
    dataloader_num_workers: int = field(default=0)
    dataloader_pin_memory: bool = field(default=False)
    remove_unused_columns: bool | None = field(default=False)
    # TRL wants a divisor of the batch. It has no other effect here: groups are formed by the rollouts.
    num_generations: int | None = field(default=None)

    correction: str = field(
        default="none",
        metadata={
            "help": "How stale tokens are corrected: `none` lets the loss clip the ratio to the policy that sampled, "
            "`truncated_is` weighs them by min(ratio, cap), `decoupled` drops those beyond the cap."
        },
    )
    correction_level: str = field(
        default="token", metadata={"help": "What shares one importance weight: a `token`, a `turn` or a `sequence`."}
    )
    correction_cap: float = field(default=2.0, metadata={"help": "Cap of the importance weights."})

    def __post_init__(self) -> None:
        if self.num_generations is None:
            batch = self.per_device_train_batch_size * self.gradient_accumulation_steps
            self.num_generations = next((d for d in range(2, batch + 1) if batch % d == 0), 2)
        super().__post_init__()


@cache
def _hints() -> dict[str, Any]:
    hints = get_type_hints(PaceConfig)
    return {f.name: hints[f.name] for f in fields(PaceConfig) if f.init}


def trainer_option_names() -> list[str]:
    """Every option that `build_config` takes."""
    return sorted(_hints().keys() - NOT_USED.keys() - {name for name in _hints() if name.startswith("vllm_")})


def build_config(options: Mapping[str, Any], *, output_dir: Path | str, **decided: Any) -> PaceConfig:
    """The trainer's config from `options` (of TOML, or strings of a command line) and what the caller decides.

    `decided` (`max_steps`, `seed`, `temperature`, ...) wins over `options`. UserError names an unknown option with the
    closest known one, one that has no effect here with the reason, and a value of the wrong type or out of range.
    """
    merged = {**options, **decided, "output_dir": str(output_dir)}
    values = {name: _checked(name, value) for name, value in merged.items()}
    if values.get("max_steps", -1) < 1:
        raise UserError(f"trainer.max_steps = {values.get('max_steps')}: training needs a number of steps, at least 1")
    try:
        return PaceConfig(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer options don't fit together: {error}") from error


def _checked(name: str, value: Any) -> Any:
    if name in NOT_USED or name.startswith("vllm_") or name == "use_vllm":
        raise UserError(f"trainer.{name} has no effect here: {NOT_USED.get(name, ENGINE)}")
    if name not in _hints():
        raise UserError(f"unknown option trainer.{name}.{did_you_mean(name, trainer_option_names())}")
    converted = convert(name, value, _hints()[name])
    if name in CHOICES and converted not in CHOICES[name]:
        raise UserError(f"trainer.{name} = {value!r} is none of its values.{did_you_mean(str(value), CHOICES[name])}")
    if name == "correction_cap" and not converted > 0:
        raise UserError(f"trainer.correction_cap = {value!r}: must be above 0")
    return converted


def convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the option's type; UserError when it is of another. Strings are read as a command line means them."""
    kinds = _kinds(hint)
    if value is None or (value == "none" and NoneType in kinds and name != "report_to"):
        if NoneType in kinds:
            return None
    elif isinstance(value, str):
        return _from_text(name, value, kinds)
    elif isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, int) and int not in kinds and float in kinds:
        return float(value)
    elif isinstance(value, tuple(kind for kind in kinds if kind is not NoneType)):
        return value
    raise _wrong_type(name, value, kinds)


def _from_text(name: str, text: str, kinds: set[type]) -> Any:
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if kinds & {dict, list} and text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"trainer.{name} = {text!r}: not JSON: {error}") from error
    if str in kinds or any(issubclass(kind, Enum) for kind in kinds):
        return text
    raise _wrong_type(name, text, kinds)


def _wrong_type(name: str, value: Any, kinds: set[type]) -> UserError:
    wanted = " or ".join(sorted("none" if kind is NoneType else kind.__name__ for kind in kinds))
    return UserError(f"trainer.{name} = {value!r}: must be {wanted}")


def _kinds(hint: Any) -> set[type]:
    """The plain types of a hint: `list[str] | None` gives list and NoneType."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(hint)))
    if hint is Any:
        return {object}
    origin = get_origin(hint) or hint
    return {origin} if isinstance(origin, type) else {object}
