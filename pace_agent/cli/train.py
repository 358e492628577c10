"""`pace-agent train`: the whole job, from a configuration to a run folder.

Two things go on at once and meet in the pool: this thread trains, and the runtime's thread plays rollouts on the
engine, which runs in a process of its own. Every step hands its weights to the engine; what is in flight goes on with
them.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pace_agent.cli.configs import write_config
from pace_agent.cli.evaluate import evaluate
from pace_agent.cli.outcome import write_outcome
from pace_agent.cli.wiring import Parts, make_engine, wire
from pace_agent.clock import WallClock
from pace_agent.config import RunConfig, trainer_options
from pace_agent.errors import PaceError, UserError
from pace_agent.evaluation.metrics import EvalResult
from pace_agent.evaluation.runner import EvalPlan
from pace_agent.ledger import Ledger
from pace_agent.pool import PacePool, PoolOptions
from pace_agent.report.files import open_run_folder
from pace_agent.report.metrics import MetricsWriter, read_metrics
from pace_agent.report.progress import Progress
from pace_agent.rollout.journal import Journal
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.rollout.thread import RuntimeThread
from pace_agent.tasks import TaskQueue
from pace_agent.types import Sample

if TYPE_CHECKING:
    from pace_agent.trainers.pace_trainer import PaceTrainer

POOL_SETTINGS = (
    *("policy", "unit", "beta", "cap", "lam", "staleness"),
    *("order", "fairness", "bins", "max_staleness", "eta"),
)
"""Settings that the pool takes as they are; the others count trajectories there and units here."""


def run(config: RunConfig, resume: Path | None) -> None:
    """Train until the last step, Ctrl-C, or an error; leave a run folder that tells all of it."""
    parts = wire(config)
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
        self.thread = RuntimeThread(self._build_runtime)
        self.trainer: PaceTrainer | None = None
        self.stopped = False
        self.seconds_before = 0.0
        self._fresh = True
        self.started = time.monotonic()

    # ---- from top to bottom -----------------------------------------------------------------------------------

    def run(self) -> None:
        total = int(self.config.trainer["max_steps"])
        checkpoint, state, done = self._checkpoint()
        self._fresh = checkpoint is None
        if checkpoint is not None and done >= total:
            raise UserError(f"{self.folder} has done its {done} steps; raise --trainer.max_steps to go on")
        progress = Progress(total, done=done, title=f"pace-agent train {self.config.env.id}")
        writer = MetricsWriter(self.folder / "metrics.jsonl", after=done if self.resumed else None)
        try:
            with self._signals(progress), writer, progress:
                progress.note(f"run folder {self.folder}")
                self._train(checkpoint, state, progress, writer)
        except PaceError:
            self.thread.close()
            self._write_outcome()
            raise
        finally:
            self.thread.close()
        self._write_outcome()

    def _write_outcome(self) -> None:
        write_outcome(self.folder, self.thread.runtime, seconds=self._seconds(), resume_hint=self.stopped)

    def _train(
        self, checkpoint: Path | None, state: Mapping[str, Any] | None, progress: Progress, writer: MetricsWriter
    ) -> None:
        self.thread.start(state)  # the engine's process starts while the trainer loads
        trainer = self.trainer = self._build_trainer(progress, writer)
        self.thread.started()
        if checkpoint is None:
            if self.resumed:
                progress.note("no checkpoint was saved yet: starting over")
            self.thread.begin()
            trainer.train()
        else:
            progress.note(f"going on from {checkpoint.name}")
            trainer.publish_at_start = self._publish_and_begin
            trainer.resume(checkpoint, restore_source=False)
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
        section, trainer, runtime = self.config.eval, self.trainer, self.thread.runtime
        plan = EvalPlan(section.tasks, section.n, self.config.run.seed, concurrency=self.config.engine.slots)

        async def held() -> EvalResult:
            runtime.hold(True)
            try:
                return await evaluate(self.parts, runtime.engine, plan, temperature=section.temperature)
            finally:
                runtime.hold(False)

        result = self.thread.call(held())
        if result.reward is None or trainer is None:
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

    def _build_runtime(self) -> Runtime:
        from pace_agent.trainers.advantages import group_advantages

        config, ledger, clock = self.config, Ledger(), WallClock()
        engine = make_engine(config, self.parts.model, self.parts.limits)
        runtime: Runtime = Runtime(
            player=self.parts.player(
                engine,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                clock=clock,
                version=lambda: runtime.version,
            ),
            engine=engine,
            queue=TaskQueue(self.parts.source, seed=config.run.seed, max_attempts=config.rollout.max_attempts),
            pool=PacePool[Sample](pool_options(config), ledger),
            ledger=ledger,
            journal=Journal(self.folder / "trajectories.jsonl"),
            ledger_log=Journal(self.folder / "ledger.jsonl"),
            advantages=group_advantages,
            options=RuntimeOptions(
                group_size=config.rollout.group_size,
                concurrency=config.rollout.concurrency,
                seed=config.run.seed,
                requeue=config.rollout.requeue,
                max_failure_share=config.rollout.max_failure_share,
            ),
            clock=clock,
            resources=() if self.parts.provider is None else (self.parts.provider,),
        )
        if self.resumed and self._fresh:
            runtime.start_over()
        return runtime

    def _build_trainer(self, progress: Progress, writer: MetricsWriter) -> "PaceTrainer":
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
        model = AutoModelForCausalLM.from_pretrained(self.parts.model, dtype=getattr(torch, config.model.dtype))
        return PaceTrainer(
            model,
            source=self.thread,
            args=args,
            tokenizer=AutoTokenizer.from_pretrained(self.parts.model),
            peft_config=_adapter(config),
            on_metrics=lambda record: self._on_metrics(record, progress, writer),
        )

    def _publish_and_begin(self, weights: Mapping[str, Any]) -> None:
        runtime = self.thread.runtime
        self.thread.call(runtime.publish(weights, runtime.version))
        self.thread.begin()

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
            if self.stopped:
                raise KeyboardInterrupt
            self.stopped = True
            progress.note("stopping after this step; press Ctrl-C again to stop at once")
            if self.trainer is not None:
                self.trainer.request_stop()
            self.thread.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started


def pool_options(config: RunConfig) -> PoolOptions:
    """The pool's section, in units."""
    section = config.pool
    size = config.rollout.group_size if section.unit == "group" else 1
    return PoolOptions(
        **{name: getattr(section, name) for name in POOL_SETTINGS},
        batch_size=section.batch_size // size,
        group_size=config.rollout.group_size,
        target=None if section.target is None else section.target // size,
        capacity=None if section.capacity is None else section.capacity // size,
    )


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
