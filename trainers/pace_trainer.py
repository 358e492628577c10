"""TRL's `GRPOTrainer`, fed from a pool instead of generating.

One step: draw a batch -> micro-batches -> TRL's loss on corrected log-probabilities -> optimiser -> publish weights.

What always holds:

* A step trains one drawn batch. The next is asked for after the weights are published, and none after the last step.
* `source.step_ended` is called once for every optimiser step, before the step is logged, evaluated or saved.
* A checkpoint holds trainer and source at the same step, or it doesn't count.

Of TRL's private surface this uses `_compute_loss`, `_get_per_token_logps_and_entropies` and the keys of a micro-batch.
The closed-form test holds a TRL version to what is expected of them.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.grpo_trainer import GRPOTrainer

from pace_agent.clock import Clock, WallClock
from pace_agent.errors import UserError
from pace_agent.trainers.checkpoint import (
    check_complete,
    load_source_state,
    mark_complete,
    read_marker,
    remove,
    remove_old,
    replace_folder,
    without_bars,
    write_source_state,
)
from pace_agent.trainers.data import BatchSource, MicroBatch, StepBatches
from pace_agent.trainers.diagnostics import Diagnostics
from pace_agent.trainers.loss import correct, fill_missing
from pace_agent.trainers.pace_config import PaceConfig
from pace_agent.trainers.scoring import can_score, live_scores
from pace_agent.trainers.weight_sync import published_weights, save_folder
from pace_agent.types import Batch

Weights = Mapping[str, Tensor]


class PaceTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trains `model` on the batches of `source`.

    `publish_at_start` receives the weights before the first step: needed where the engine doesn't hold them yet, after
    a resume or with an adapter that is not fresh. `on_metrics` receives the record of every logged step, with `step`.
    `clock` is what seconds are read from. `on_computed` receives the batch when its optimiser step is computed, before
    its weights are published: on virtual time the step's seconds pass there.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        source: BatchSource,
        args: PaceConfig,
        tokenizer: Any,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        on_metrics: Callable[[dict[str, float]], None] | None = None,
        publish_at_start: Callable[[Weights], None] | None = None,
        clock: Clock | None = None,
        on_computed: Callable[[Batch], None] | None = None,
    ) -> None:
        if args.world_size > 1:
            raise UserError(f"the trainer runs in one process, but {args.world_size} were launched")
        self.source = source
        self.on_metrics = on_metrics
        self.publish_at_start = publish_at_start
        self.clock = clock or WallClock()
        self.on_computed = on_computed
        self.policy_version = 0
        self.best_value: float | None = None
        self._diagnostics = Diagnostics()
        self._latest: dict[str, float] = {}
        self._micro: MicroBatch | None = None
        self._batch: Batch | None = None
        self._wait_seconds = 0.0
        self._step_started = 0.0
        self._saved_step = -1
        self._stop_requested = False
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            callbacks=[_StepHooks(self), *(callbacks or [])],
            peft_config=peft_config,
        )
        self.remove_callback(PrinterCallback)  # whoever runs us prints
        if peft_config is not None:
            self.published_weights()  # an adapter that can't be merged is found before the first step, not after it
        self._scores_live = can_score(self.model) and not self.aux_loss_enabled and args.device.type == "cpu"

    # ---- running --------------------------------------------------------------------------------------------------

    def resume(self, checkpoint: Path, *, restore_source: bool = True) -> Any:
        """Go on from a whole checkpoint: model, optimiser, schedule, random state, step, and the source's state.

        `restore_source=False` where the caller has loaded the source's state itself.
        """
        check_complete(checkpoint)
        facts = read_marker(checkpoint)
        self.policy_version, self.best_value = facts["policy_version"], facts["best_value"]
        if restore_source:
            self.source.load_state_dict(load_source_state(checkpoint))
        return self.train(resume_from_checkpoint=str(checkpoint))

    def request_stop(self) -> None:
        """End after the running step, with a checkpoint. Safe to call from a signal handler or another thread.

        It doesn't end a wait for a batch: the source does that, by answering None.
        """
        self._stop_requested = True

    # ---- batches --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[MicroBatch]:
        return StepBatches(
            self.source,
            micro_batch=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            pad_id=self._tokenizer.pad_token_id,
            clock=self.clock,
            on_batch=self._on_batch,
        ).loader()

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatch], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], Any]:
        samples, n_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            self.control.should_training_stop = True
            self.control.should_save = self._saved_step < self.state.global_step
        return samples, n_items

    def _on_batch(self, batch: Batch, wait_seconds: float) -> None:
        self._batch = batch
        self._wait_seconds = wait_seconds
        self._step_started = self.clock.now()

    def _prepare_inputs(self, micro: MicroBatch) -> MicroBatch:
        """In place of TRL's, which would generate."""
        inputs: MicroBatch = self._prepare_input(micro)
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference_logps(inputs)
        return inputs

    # ---- loss -----------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch) -> Tensor:
        self._micro = inputs
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        finally:
            self._micro = None

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score the sampled tokens alone, and put the corrections in front of the loss that has asked.

        The loss reads the old log-probabilities and the advantages from its inputs after this call, so they can be
        derived from the log-probabilities of the same forward pass.
        """
        micro = self._micro
        if micro is not None and self._scores_live and model is self.model and not self._entropy_bonus_enabled:
            share = not self.args.gradient_checkpointing
            logps, entropies = live_scores(model, input_ids, micro["live"], self.temperature, share_prefix=share)
            aux_loss = None
        else:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        if micro is not None:
            logps = torch.where(micro["live"], logps, 0.0)
            self._correct(micro, logps)
        return logps, entropies, aux_loss

    def _correct(self, micro: MicroBatch, logps: Tensor) -> None:
        live = micro["live"]
        behaviour, missing = fill_missing(micro["sampling_per_token_logps"], logps, live)
        corrected = correct(
            self.args.correction,
            current=logps,
            behaviour=behaviour,
            advantages=micro["advantages"].view(-1, 1),
            mask=live,
            level=self.args.correction_level,
            cap=self.args.correction_cap,
            turns=micro["turns"],
        )
        micro["sampling_per_token_logps"] = behaviour
        micro["old_per_token_logps"] = corrected.old
        micro["advantages"] = corrected.advantages
        version = self._batch.version if self._batch else 0
        self._diagnostics.add(logps, behaviour, live, version - micro["versions"], missing, corrected.capped)

    @torch.no_grad()
    def _reference_logps(self, inputs: MicroBatch) -> Tensor:
        """Log-probabilities of the reference model: TRL's copy, or this model with its adapter switched off."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        if self.ref_model is not None:
            logps = super()._get_per_token_logps_and_entropies(self.ref_model, ids, mask, width)[0]
        else:
            with self.model.disable_adapter():
                logps = super()._get_per_token_logps_and_entropies(self.model, ids, mask, width)[0]
        return torch.where(inputs["live"], logps, 0.0)

    # ---- the end of a step ------------------------------------------------------------------------------------------

    def published_weights(self) -> dict[str, Tensor]:
        """The weights under the names that an engine loads, adapters merged."""
        return published_weights(self.accelerator.unwrap_model(self.model))

    def _step_ended(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None and self.on_computed is not None:
            self.on_computed(batch)
        started = self.clock.now()
        step_seconds = started - self._step_started
        self.policy_version = self.source.step_ended(self.published_weights())
        self._latest = {
            **(batch.metrics if batch else {}),
            **self._diagnostics.take(),
            "trainer/wait_seconds": self._wait_seconds,
            "trainer/step_seconds": step_seconds,
            "trainer/publish_seconds": self.clock.now() - started,
            "trainer/policy_version": float(self.policy_version),
            "step_time": step_seconds,  # in place of TRL's, which is of real time
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Every logger that HF knows gets the figures of the latest step beside TRL's, which it averages."""
        of_a_step = "loss" in logs
        if of_a_step:
            logs.update(self._latest)
        super().log(logs, start_time)
        if of_a_step and self.on_metrics is not None:
            self.on_metrics({**logs, **self._latest, "step": self.state.global_step})

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        remove(folder)
        # Removing older ones is ours: HF's would do it before the new one counts.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with without_bars():
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        write_source_state(folder, self.source.state_dict())
        facts = {"step": self.state.global_step, "policy_version": self.policy_version, "best_value": self.best_value}
        mark_complete(folder, **facts)
        if limit is not None:
            remove_old(folder.parent, max(limit, 2))
        self._saved_step = self.state.global_step

    def save_if_unsaved(self) -> bool:
        """Save a checkpoint of the last step that ended, if there is none yet; whether there is one now.

        For a run that can't go on: what ended it came up between two steps.
        """
        step = int(self.state.global_step)
        if self._batch is None and step > self._saved_step >= 0:
            self._save_checkpoint(self.model, trial=None)
        return self._saved_step == step > 0

    def save_final(self, folder: Path) -> None:
        """A plain model folder with its tokenizer, adapters merged, that `from_pretrained` loads."""
        unfinished = folder.with_name(f"{folder.name}.tmp")
        with without_bars():
            save_folder(self.accelerator.unwrap_model(self.model), self._tokenizer, str(unfinished))
        replace_folder(unfinished, folder)

    def save_best(self, value: float, folder: Path) -> bool:
        """Save the model to `folder` when `value` (higher is better) is the best so far; whether it was."""
        if self.best_value is not None and value <= self.best_value:
            return False
        self.save_final(folder)
        self.best_value = value
        return True

    # ---- what TRL would do to the outside ---------------------------------------------------------------------------

    def _send_telemetry(self) -> None:
        """Nothing leaves the machine that the user has not asked for."""

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """No card: a run folder has a report of its own."""


class _StepHooks(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: PaceTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        trainer = self.trainer
        trainer._saved_step = state.global_step
        if trainer.publish_at_start is not None:
            trainer.publish_at_start(trainer.published_weights())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> TrainerControl:
        self.trainer._step_ended()
        if self.trainer._stop_requested:
            control.should_training_stop = control.should_save = True
        return control


def _no_reward(**columns: Any) -> list[float]:
    raise AssertionError("rewards come with the batch")
