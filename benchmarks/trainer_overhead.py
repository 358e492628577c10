"""CPU seconds of an optimiser step: the trainer against a bare PyTorch loop with the same loss on the same batch.

    python benchmarks/trainer_overhead.py [--sweep] [--steps 7] [--micro-batch 16] [--shared-prefix 0]

The bare loop gets finished micro-batches, sorted by length, and knows that rows padded on the right need no attention
mask. It scores the completion's positions and does nothing but forward, backward, clipping and AdamW. The trainer's
step is everything from the draw to the next one: making tensors, loss, optimiser, publishing a copy, metrics, logging.
The two take turns, step by step, on one thread. The model is the embedded one (0.66 M parameters), the batch holds 128
trajectories of 100 to 200 tokens. `--shared-prefix N` lets all of them begin with the same N tokens, as they do when a
system message lists the tools; the bare loop computes these for every row.

The last line is JSON: `cpu_ratio` is the median over steps of trainer / bare.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from pace_agent.trainers.data import MicroBatch, micro_batches
from pace_agent.trainers.loss import clipped_loss
from pace_agent.trainers.pace_config import build_config
from pace_agent.trainers.pace_trainer import PaceTrainer
from pace_agent.types import Batch, Sample, StopReason, Task, Trajectory, Turn, VersionSpan

VOCABULARY, BATCH = 512, 128
LEARNING_RATE, EPSILON_LOW, EPSILON_HIGH = 1e-5, 0.2, 0.28


def make_model() -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.04,
        rope_theta=10_000.0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="<eos>"
    )


def make_batch(shared_prefix: int, seed: int = 0) -> Batch:
    """Three turns each: a prompt of 50 tokens or more, then short observations between the answers."""
    rng = np.random.default_rng(seed)
    shared = tuple(range(2, 2 + shared_prefix))

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(2, VOCABULARY, n).tolist())

    def turn(prompt: tuple[int, ...], n: int) -> Turn:
        logprobs = tuple((-6.2 + 0.2 * rng.standard_normal(n)).tolist())
        return Turn(prompt, ids(n), logprobs, (VersionSpan(0, 0, n),))

    def trajectory(number: int) -> Trajectory:
        first = max(50, shared_prefix + 10)
        rest = int(rng.integers(100, 201)) - first
        observation = rest // 6
        answer = (rest - 2 * observation) // 3
        last = rest - 2 * observation - 2 * answer
        turns = (
            turn(shared + ids(first - shared_prefix), answer),
            turn(ids(observation), answer),
            turn(ids(observation), last),
        )
        task = Task(id=str(number), prompt="")
        return Trajectory(number, number // 8, task, "bench", 0, turns, (), StopReason.TERMINATED, 0.0, 0)

    samples = tuple(Sample(trajectory(i), float(rng.standard_normal())) for i in range(BATCH))
    return Batch(step=0, version=0, samples=samples)


class BareLoop:
    """What one would write by hand."""

    def __init__(self, parts: list[MicroBatch]) -> None:
        self.parts = parts
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self) -> float:
        total = 0.0
        for part in self.parts:
            ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
            width = part["completion_ids"].shape[1]
            logits = self.model(input_ids=ids, logits_to_keep=width + 1, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits, dim=-1).gather(-1, part["completion_ids"].unsqueeze(-1)).squeeze(-1)
            loss = clipped_loss(
                logps,
                part["old_per_token_logps"],
                part["advantages"].unsqueeze(1),
                part["live"],
                epsilon_low=EPSILON_LOW,
                epsilon_high=EPSILON_HIGH,
                n_tokens=float(part["num_items_in_batch"]),
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class TimedSource:
    """Times the trainer's step from draw to draw, and runs a step of the bare loop in between."""

    def __init__(self, batch: Batch, bare: Callable[[], float], steps: int) -> None:
        self.batch = batch
        self.bare = bare
        self.left = steps
        self.trainer_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.bare_losses: list[float] = []
        self.version = 0
        self._started: float | None = None

    def next_batch(self) -> Batch | None:
        now = time.process_time()
        if self._started is not None:
            self.trainer_seconds.append(now - self._started)
        if self.left == 0:
            return None
        self.left -= 1
        now = time.process_time()
        self.bare_losses.append(self.bare())
        self.bare_seconds.append(time.process_time() - now)
        self._started = time.process_time()
        return self.batch

    def step_ended(self, weights: Mapping[str, Any]) -> int:
        self.version += 1
        self.kept = {name: tensor.clone() for name, tensor in weights.items()}
        return self.version

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def measure(micro_batch: int, steps: int, shared_prefix: int) -> tuple[float, float, float]:
    """Median CPU seconds of a step (trainer, bare), and the median of their ratio. The first step warms up."""
    batch = make_batch(shared_prefix)
    source = TimedSource(
        batch, BareLoop(micro_batches(batch, count=len(batch.samples) // micro_batch, pad_id=0)).step, steps + 1
    )
    with tempfile.TemporaryDirectory() as folder:
        options = {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "save_strategy": "no"}
        args = build_config(
            {**options, "epsilon": EPSILON_LOW, "epsilon_high": EPSILON_HIGH},
            output_dir=folder,
            max_steps=steps + 10,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=BATCH // micro_batch,
            use_cpu=True,
        )
        losses: list[float] = []
        PaceTrainer(
            make_model(),
            source=source,
            args=args,
            tokenizer=make_tokenizer(),
            on_metrics=lambda record: losses.append(record["loss"]),
        ).train()
    if max(abs(ours - theirs) for ours, theirs in zip(losses, source.bare_losses, strict=True)) > 1e-4:
        raise SystemExit(f"the losses differ: {losses} and {source.bare_losses}")
    trainer, bare = source.trainer_seconds[1:], source.bare_seconds[1:]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(trainer, bare, strict=True))
    return statistics.median(trainer), statistics.median(bare), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="all micro-batch sizes from 8 to 128")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes = [8, 16, 32, 64, 128] if options.sweep else [options.micro_batch]
    print(f"{'micro-batch':>11}  {'trainer, CPU s':>14}  {'bare, CPU s':>11}  {'ratio':>6}")
    ratios: dict[int, float] = {}
    for size in sizes:
        trainer, bare, ratios[size] = measure(size, options.steps, options.shared_prefix)
        print(f"{size:>11}  {trainer:>14.3f}  {bare:>11.3f}  {ratios[size]:>6.3f}", flush=True)
    reported = options.micro_batch if options.micro_batch in ratios else sizes[0]
    print(json.dumps({"cpu_ratio": round(ratios[reported], 3), "micro_batch": reported, "steps": options.steps}))


if __name__ == "__main__":
    main()
