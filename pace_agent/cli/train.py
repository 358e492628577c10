"""`pace-agent train`: the whole job, from a configuration to a run folder.

Two things go on at once and meet in the pool: this process trains, and another one plays rollouts on the engine. Every
step hands its weights to the engine; what is in flight goes on with them.

On virtual time both are in this process, and take turns: a step is computed at once, then its seconds pass for the
rollouts, then its weights are published.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pace_agent.cli.configs import write_config
from pace_agent.cli.outcome import write_outcome
from pace_agent.cli.rollouts import RunEnd, end, evaluate_held, open_runtime, open_virtual_runtime
from pace_agent.cli.serving import Served, check_serving, serving, showing_logs
from pace_agent.cli.wiring import Parts, costs_of, wire
from pace_agent.clock import Clock, VirtualClock, WallClock
from pace_agent.config import RunConfig, trainer_options
from pace_agent.errors import PaceError, RunError, UserError
from pace_agent.evaluation.runner import EvalPlan
from pace_agent.report.files import open_run_folder
from pace_agent.report.metrics import MetricsWriter, read_metrics
from pace_agent.report.progress import Progress
from pace_agent.rollout.handle import RuntimeHandle
from pace_agent.types import Batch

if TYPE_CHECKING:
    from pace_agent.trainers.pace_trainer import PaceTrainer


def run(config: RunConfig, resume: Path | None) -> None:
    """Train until the last step, Ctrl-C, or an error; leave a run folder that tells all of it."""
    parts = wire(config)
    check_serving(config)
    folder = resume or _new_folder(config)
    if resume is None:
        write_config(folder / "config.toml", config)
    Training(config, parts, folder, resumed=resume is not None).run()


def _new_folder(config: RunConfig) -> Path:
    name = config.env.id.rpartition(":")[2].rpartition("/")[2]
    return open_run_folder(config.run.dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


class Training:
    """One process's share of a run: what it opens is closed when `run` returns, however it ends."""

    def __init__(self, config: RunConfig, parts: Parts, folder: Path, *, resumed: bool) -> None:
        self.config = config
        self.parts = parts
        self.folder = folder
        self.resumed = resumed
        self.rollouts: RuntimeHandle | None = None
        self.trainer: PaceTrainer | None = None
        self.served: Served | None = None
        self.outcome: RunEnd | None = None
        self.stopped = False
        self.seconds_before = 0.0
        self.clock: Clock = WallClock()
        self.on_computed: Callable[[Batch], None] | None = None

    # ---- from top to bottom -----------------------------------------------------------------------------------

    def run(self) -> None:
        total = int(self.config.trainer["max_steps"])
        checkpoint, state, done = self._checkpoint()
        if checkpoint is not None and done >= total:
            raise UserError(f"{self.folder} has done its {done} steps; raise --trainer.max_steps to go on")
        progress = Progress(total, done=done, title=f"pace-agent train {self.config.env.id}")
        writer = MetricsWriter(self.folder / "metrics.jsonl", after=done if self.resumed else None)
        try:
            with self._signals(progress), writer, progress, showing_logs(progress):
                progress.note(f"run folder {self.folder}")
                with serving(self.config, self.parts.model, self.folder / "logs", progress.note) as self.served:
                    self._run(checkpoint, state, progress, writer)
        finally:
            if self.outcome is not None:
                write_outcome(self.folder, self.outcome, seconds=self._seconds(), resume_hint=self.stopped)

    def _run(
        self, checkpoint: Path | None, state: Mapping[str, Any] | None, progress: Progress, writer: MetricsWriter
    ) -> None:
        rollouts = self.rollouts = self._open_rollouts(start_over=self.resumed and checkpoint is None)
        try:
            self._train(rollouts, checkpoint, state, progress, writer)
            self.outcome = rollouts.ask(end)
        except PaceError:
            with suppress(PaceError):  # the rollout side may be what failed
                self.outcome = rollouts.ask(end)
            raise
        finally:
            rollouts.close()

    def _open_rollouts(self, *, start_over: bool) -> RuntimeHandle:
        if self.config.clock.kind == "wall":
            return open_runtime(self.config, self.folder, start_over=start_over, served=self.served)
        clock, costs = VirtualClock(), costs_of(self.config)
        rollouts = open_virtual_runtime(self.config, self.folder, clock, start_over=start_over)

        def spend(batch: Batch) -> None:
            tokens = sum(sample.trajectory.n_sampled for sample in batch.samples)
            rollouts.spend(costs.trainer_step(tokens))

        self.clock, self.on_computed = clock, spend
        return rollouts

    def _train(
        self,
        rollouts: RuntimeHandle,
        checkpoint: Path | None,
        state: Mapping[str, Any] | None,
        progress: Progress,
        writer: MetricsWriter,
    ) -> None:
        rollouts.start(state)  # in a process of its own the engine loads while the trainer does
        if self.config.clock.kind == "virtual" or not self.config.engine.process:
            rollouts.started()  # transformers can't load two models at once in one process
        trainer = self.trainer = self._build_trainer(rollouts, progress, writer)
        rollouts.started()
        has_weights = checkpoint is None and (self.served is None or self.served.ours)

        def begin(weights: Mapping[str, Any]) -> None:
            if self.stopped:
                return
            if not has_weights:
                rollouts.publish(weights)
            rollouts.begin()

        trainer.publish_at_start = begin
        try:
            if checkpoint is None:
                if self.resumed:
                    progress.note("no checkpoint was saved yet: starting over")
                trainer.train()
            else:
                progress.note(f"going on from {checkpoint.name}")
                trainer.resume(checkpoint, restore_source=False)
        except RunError:
            with suppress(PaceError):  # the rollout side may be what failed
                self.stopped |= trainer.save_if_unsaved()
            raise
        trainer.save_final(self.folder / "final")

    def _on_metrics(self, record: Mapping[str, float], progress: Progress, writer: MetricsWriter) -> None:
        step = int(record["step"])
        metrics = {name: value for name, value in record.items() if name not in ("step", "epoch")}
        metrics["run/seconds"] = self._seconds()
        every = self.config.eval.every
        if every and step % every == 0:
            metrics |= self._evaluate(progress)
        writer.write(step, metrics)
        progress.update({"step": step, **metrics})

    def _evaluate(self, progress: Progress) -> dict[str, float]:
        """Held-out tasks under the published weights; no new rollout starts meanwhile. Keeps the best model."""
        section, trainer, rollouts = self.config.eval, self.trainer, self.rollouts
        assert trainer is not None
        assert rollouts is not None
        plan = EvalPlan(section.tasks, section.n, self.config.run.seed, concurrency=self.config.engine.slots)
        result = rollouts.ask(evaluate_held, plan, temperature=section.temperature)
        if result.reward is None:
            progress.note(f"evaluation: nothing was scored, {result.errors} failed: {dict(result.errors_by_reason)}")
            return {}
        best = trainer.save_best(result.reward.mean, self.folder / "best")
        progress.note(f"evaluation: reward {result.reward.mean:.3f}{', the best so far' if best else ''}")
        return {
            "eval/reward_mean": result.reward.mean,
            "eval/truncated_share": result.truncated_share,
            "eval/errors": float(result.errors),
        }

    # ---- parts ------------------------------------------------------------------------------------------------

    def _build_trainer(self, rollouts: RuntimeHandle, progress: Progress, writer: MetricsWriter) -> "PaceTrainer":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from pace_agent.trainers.pace_config import build_config
        from pace_agent.trainers.pace_trainer import PaceTrainer

        config = self.config
        logging.disable_progress_bar()  # the display has a line of its own
        torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        args = build_config(
            trainer_options(config),
            output_dir=self.folder / "checkpoints",
            save_steps=config.run.checkpoint_every,
            save_total_limit=config.run.keep_checkpoints,
            disable_tqdm=True,
        )
        try:
            model = AutoModelForCausalLM.from_pretrained(self.parts.model, dtype=getattr(torch, config.model.dtype))
        except Exception as error:  # of any kind: safetensors and torch have their own
            raise UserError(f"model.path = {config.model.path!r} can't be loaded: {error}") from error
        return PaceTrainer(
            model,
            source=rollouts,
            args=args,
            tokenizer=AutoTokenizer.from_pretrained(self.parts.model),
            peft_config=_adapter(config),
            on_metrics=lambda record: self._on_metrics(record, progress, writer),
            clock=self.clock,
            on_computed=self.on_computed,
        )

    # ---- resuming and stopping --------------------------------------------------------------------------------

    def _checkpoint(self) -> tuple[Path | None, Mapping[str, Any] | None, int]:
        """The newest whole checkpoint, its state and its step; nothing for a new run, or one that saved none yet."""
        if not self.resumed:
            return None, None, 0
        from pace_agent.trainers.checkpoint import find_checkpoint, load_source_state

        checkpoint = find_checkpoint(self.folder)
        if checkpoint is None:
            return None, None, 0
        state = load_source_state(checkpoint)
        done = int(state["step"])
        rows = read_metrics(self.folder / "metrics.jsonl")
        self.seconds_before = max((row.get("run/seconds", 0.0) for row in rows if row["step"] <= done), default=0.0)
        return checkpoint, state, done

    @contextmanager
    def _signals(self, progress: Progress) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) ends the run after its step, with a checkpoint; the second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopped or self.rollouts is None:
                raise KeyboardInterrupt
            self.stopped = True
            progress.note("stopping after this step; press Ctrl-C again to stop at once")
            if self.trainer is not None:
                self.trainer.request_stop()
            if self.rollouts is not None:
                self.rollouts.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _seconds(self) -> float:
        return self.seconds_before + self.clock.now()


def _adapter(config: RunConfig) -> Any:
    if not config.model.lora_r:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=config.model.lora_r,
        lora_alpha=config.model.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
