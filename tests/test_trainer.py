"""The trainer on tiny random models, fed by a source that holds its batches in memory."""

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from pace_agent.errors import RunError, UserError
from pace_agent.trainers.checkpoint import find_checkpoint, load_source_state, remove_old
from pace_agent.trainers.data import check_batch, micro_batches
from pace_agent.trainers.pace_config import build_config, trainer_option_names
from pace_agent.trainers.pace_trainer import PaceTrainer
from pace_agent.trainers.scoring import live_scores, shared_prefix
from pace_agent.trainers.weight_sync import published_weights
from pace_agent.types import Batch, Sample, StopReason, Task, Trajectory, Turn, VersionSpan

VOCABULARY = 48


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="<eos>"
    )
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


def tiny_model(kind: str = "qwen3", seed: int = 0) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = Qwen3Config(head_dim=16, tie_word_embeddings=True, **sizes) if kind == "qwen3" else LlamaConfig(**sizes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trajectory(rng: np.random.Generator, number: int, shared: tuple[int, ...] = ()) -> Trajectory:
    """Two or three turns of random ids and log-probabilities around -2."""
    turns = []
    for place in range(int(rng.integers(2, 4))):
        prompt = tuple(rng.integers(2, VOCABULARY, int(rng.integers(2, 9))).tolist())
        n = int(rng.integers(2, 8))
        output = tuple(rng.integers(2, VOCABULARY, n).tolist())
        logprobs = tuple((-2.0 + 0.3 * rng.standard_normal(n)).tolist())
        spans = (VersionSpan(0, 0, 1), VersionSpan(1, 1, n))
        turns.append(Turn(shared * (place == 0) + prompt, output, logprobs, spans))
    return Trajectory(
        id=number,
        group_id=number // 4,
        task=Task(id=str(number), prompt=""),
        env_id="test",
        attempt=0,
        turns=tuple(turns),
        messages=(),
        stop=StopReason.TERMINATED,
        reward=0.0,
        completed_version=1,
    )


def make_batch(step: int, size: int = 16, shared: tuple[int, ...] = ()) -> Batch:
    rng = np.random.default_rng(step)
    samples = tuple(
        Sample(trajectory(rng, step * size + i, shared), float(rng.standard_normal()), float(rng.uniform(0.5, 1.5)))
        for i in range(size)
    )
    return Batch(step=step, version=step, samples=samples, metrics={"reward/mean": 0.25, "pool/occupancy": 40.0})


class MemorySource:
    """Gives `batches` one by one and keeps every event and the last published weights."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.position = 0
        self.version = 0
        self.events: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def next_batch(self) -> Batch | None:
        self.events.append("draw")
        if self.position == len(self.batches):
            return None
        self.position += 1
        return self.batches[self.position - 1]

    def step_ended(self, weights: Mapping[str, Any]) -> int:
        self.version += 1
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.events.append(f"publish {self.version}")
        return self.version

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.version = state["position"], state["version"]


def make_trainer(
    folder: Path,
    tokenizer: Any,
    source: MemorySource,
    *,
    model: Any = None,
    micro_batch: int = 8,
    accumulation: int = 2,
    max_steps: int = 2,
    peft_config: Any = None,
    publish_at_start: Any = None,
    **options: Any,
) -> tuple[PaceTrainer, list[dict[str, float]]]:
    args = build_config(
        {
            "learning_rate": 1e-2,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "save_strategy": "steps" if "save_steps" in options else "no",
            **options,
        },
        output_dir=folder,
        max_steps=max_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
    )
    records: list[dict[str, float]] = []
    trainer = PaceTrainer(
        tiny_model() if model is None else model,
        source=source,
        args=args,
        tokenizer=tokenizer,
        peft_config=peft_config,
        on_metrics=records.append,
        publish_at_start=publish_at_start,
    )
    return trainer, records


def by_hand(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[float, float]:
    """Loss and gradient norm of a batch, one trajectory at a time, from whole unpadded sequences."""
    n_tokens = sum(sample.trajectory.n_sampled for sample in batch.samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in batch.samples:
        ids = torch.tensor([sample.trajectory.ids()])
        logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double() / temperature, dim=-1)
        current = logps[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        old = torch.tensor(sample.trajectory.rollout_logprobs()[1:], dtype=torch.float64)
        live = torch.tensor(sample.trajectory.loss_mask()[1:], dtype=torch.bool)
        ratio = torch.exp(current[live] - old[live])
        advantage = sample.advantage * sample.weight
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = loss - gain.sum() / n_tokens
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))
    return loss.item(), norm


def with_logprobs(batch: Batch, logprobs: Callable[[Trajectory, int], tuple[float, ...]]) -> Batch:
    """The batch with other behaviour log-probabilities: `logprobs(trajectory, turn)` gives those of a turn."""
    samples = []
    for sample in batch.samples:
        old = sample.trajectory
        turns = tuple(replace(turn, logprobs=logprobs(old, i)) for i, turn in enumerate(old.turns))
        samples.append(replace(sample, trajectory=replace(old, turns=turns)))
    return replace(batch, samples=tuple(samples))


def shifted(batch: Batch, by: float) -> Batch:
    return with_logprobs(batch, lambda old, i: tuple(value + by for value in old.turns[i].logprobs))


def on_policy(model: Any, batch: Batch, temperature: float = 1.0, noise: float = 0.0) -> Batch:
    """The log-probabilities that `model` gives the same ids, with an error of deviation `noise` per turn."""
    rng = np.random.default_rng(0)

    def logprobs(old: Trajectory, place: int) -> tuple[float, ...]:
        ids = torch.tensor([old.ids()])
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
        start = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in old.turns[:place])
        start += len(old.turns[place].prompt_ids)
        places = torch.arange(start, start + len(old.turns[place].output_ids))
        return tuple((logps[places - 1, ids[0, places]] + noise * rng.standard_normal()).tolist())

    return with_logprobs(batch, logprobs)


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "micro_batch", "accumulation"), [("qwen3", 16, 1), ("qwen3", 8, 2), ("qwen3", 4, 4), ("llama", 8, 2)]
)
def test_loss_and_gradient_equal_the_closed_form_however_the_batch_is_cut(
    tmp_path, tokenizer, kind, micro_batch, accumulation
):
    batch = make_batch(0)
    expected_loss, expected_norm = by_hand(tiny_model(kind), batch)
    trainer, records = make_trainer(
        tmp_path,
        tokenizer,
        MemorySource([batch]),
        model=tiny_model(kind),
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_steps=1,
    )
    trainer.train()
    assert records[0]["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert records[0]["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)


def test_the_behaviour_logprobs_reach_the_loss(tmp_path, tokenizer):
    figures = []
    for batch in (make_batch(0), shifted(make_batch(0), 0.5)):
        trainer, records = make_trainer(tmp_path, tokenizer, MemorySource([batch]), max_steps=1)
        trainer.train()
        assert records[0]["loss"] == pytest.approx(by_hand(tiny_model(), batch)[0], abs=1e-6)
        figures.append((records[0]["loss"], records[0]["grad_norm"]))
    assert abs(figures[0][0] - figures[1][0]) > 1e-3
    assert abs(figures[0][1] - figures[1][1]) > 1e-3


def test_trls_own_scoring_gives_the_same_loss(tmp_path, tokenizer):
    """The way that devices other than a CPU take."""
    batch = make_batch(0)
    trainer, records = make_trainer(tmp_path, tokenizer, MemorySource([batch]), max_steps=1)
    trainer._scores_live = False
    trainer.train()
    expected_loss, expected_norm = by_hand(tiny_model(), batch)
    assert records[0]["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert records[0]["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)


def test_ratio_is_one_at_the_sampling_temperature(tmp_path, tokenizer):
    batch = on_policy(tiny_model(), make_batch(0), 0.6)
    for temperature, right in ((0.6, True), (1.0, False)):
        trainer, records = make_trainer(
            tmp_path,
            tokenizer,
            MemorySource([batch]),
            max_steps=1,
            temperature=temperature,
        )
        trainer.train()
        assert (abs(records[0]["trainer/ratio_mean"] - 1.0) < 1e-3) is right
        assert (records[0]["clip_ratio/region_mean"] == 0.0) is right


def test_a_nan_logprob_is_counted_and_trains_on(tmp_path, tokenizer):
    batch = with_logprobs(make_batch(0), lambda old, i: (math.nan, *old.turns[i].logprobs[1:]))
    trainer, records = make_trainer(tmp_path, tokenizer, MemorySource([batch]), max_steps=1)
    trainer.train()
    assert records[0]["trainer/missing_logprobs"] == sum(len(sample.trajectory.turns) for sample in batch.samples)
    assert math.isfinite(records[0]["loss"])
    assert math.isfinite(records[0]["grad_norm"])


@pytest.mark.parametrize("correction", ["truncated_is", "decoupled"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_corrections_train_and_report_what_they_capped(tmp_path, tokenizer, correction, level):
    trainer, records = make_trainer(
        tmp_path,
        tokenizer,
        MemorySource([on_policy(tiny_model(), make_batch(0), noise=0.5)]),
        max_steps=1,
        correction=correction,
        correction_level=level,
        correction_cap=1.1,
    )
    trainer.train()
    assert 0 < records[0]["trainer/capped_share"] < 1
    assert records[0]["clip_ratio/region_mean"] == 0.0
    assert records[0]["grad_norm"] > 0


def test_a_divergence_penalty_needs_no_more_than_its_option(tmp_path, tokenizer):
    tiny_model().save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    source = MemorySource([make_batch(0), make_batch(1)])
    trainer, records = make_trainer(tmp_path / "run", tokenizer, source, model=model, beta=0.1)
    trainer.train()
    assert records[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert records[1]["kl"] > 1e-4


# ---- batches --------------------------------------------------------------------------------------------------------


def test_micro_batches_keep_every_token_and_count_the_whole_step():
    batch = make_batch(3)
    parts = micro_batches(batch, count=4, pad_id=0)
    widths = [part["completion_ids"].shape[1] + part["prompt_ids"].shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True)
    n_tokens = sum(sample.trajectory.n_sampled for sample in batch.samples)
    assert sum(int(part["live"].sum()) for part in parts) == n_tokens
    rows = set()
    for part in parts:
        assert part["num_items_in_batch"].item() == n_tokens
        assert bool((part["prompt_mask"] == 1).all())
        for i in range(4):
            ids = torch.cat([part["prompt_ids"][i], part["completion_ids"][i]])
            filled = torch.cat([part["prompt_mask"][i], part["completion_mask"][i]]).bool()
            live = part["live"][i]
            rows.add(
                (
                    tuple(ids[filled].tolist()),
                    tuple(part["completion_ids"][i][live].tolist()),
                    tuple(part["versions"][i][live].tolist()),
                    tuple(round(value, 5) for value in part["old_per_token_logps"][i][live].tolist()),
                    round(part["advantages"][i].item(), 5),
                )
            )
    assert rows == {
        (
            tuple(sample.trajectory.ids()),
            tuple(token for turn in sample.trajectory.turns for token in turn.output_ids),
            tuple(sample.trajectory.sampled_versions().tolist()),
            tuple(round(float(np.float32(v)), 5) for turn in sample.trajectory.turns for v in turn.logprobs),
            round(float(np.float32(sample.advantage * sample.weight)), 5),
        )
        for sample in batch.samples
    }


def test_a_shared_beginning_is_computed_once_with_the_same_result():
    model = tiny_model()
    part = micro_batches(make_batch(1, shared=tuple(range(2, 42))), count=1, pad_id=0)[0]
    ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
    assert shared_prefix(ids, part["prompt_ids"].shape[1] - 1) == 40
    assert shared_prefix(ids[:1], 40) == 0
    gradients = []
    for sharing in (True, False):
        rows = [ids] if sharing else list(ids.split(1))
        lives = [part["live"]] if sharing else list(part["live"].split(1))
        model.zero_grad()
        scores = torch.cat([live_scores(model, row, live, 1.0)[0] for row, live in zip(rows, lives, strict=True)])
        scores.sum().backward()
        gradients.append((scores.detach(), [p.grad.clone() for p in model.parameters()]))
    assert torch.allclose(gradients[0][0], gradients[1][0], atol=1e-5)
    for one, other in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_batch_is_drawn_when_a_step_begins_and_none_after_the_last(tmp_path, tokenizer):
    source = MemorySource([make_batch(i) for i in range(5)])
    trainer, records = make_trainer(tmp_path, tokenizer, source, max_steps=3)
    trainer.train()
    assert source.events == ["draw", "publish 1", "draw", "publish 2", "draw", "publish 3"]
    assert [record["trainer/policy_version"] for record in records] == [1, 2, 3]


def test_training_ends_with_a_checkpoint_when_the_source_has_no_more(tmp_path, tokenizer):
    source = MemorySource([make_batch(i) for i in range(2)])
    trainer, records = make_trainer(tmp_path, tokenizer, source, max_steps=50)
    trainer.train()
    assert source.events == ["draw", "publish 1", "draw", "publish 2", "draw"]
    assert len(records) == 2
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_stop_ends_the_running_step_with_a_checkpoint(tmp_path, tokenizer):
    source = MemorySource([make_batch(i) for i in range(5)])
    trainer, records = make_trainer(tmp_path, tokenizer, source, max_steps=5)
    trainer.on_metrics = lambda record: records.append(record) or trainer.request_stop()
    trainer.train()
    assert source.version == 2
    assert load_source_state(tmp_path / "checkpoint-2") == {"position": 2, "version": 2}


def test_a_batch_of_another_size_is_refused(tmp_path, tokenizer):
    trainer, _ = make_trainer(tmp_path, tokenizer, MemorySource([make_batch(0, size=17)]), max_steps=1)
    with pytest.raises(RunError, match="17 trajectories; the trainer takes 2 to 8 x 2"):
        trainer.train()


def test_a_batch_that_can_not_be_cut_names_the_closest_size():
    assert check_batch(128, 16) == 8
    assert check_batch(128, 16, 8) == 8
    with pytest.raises(UserError, match="closest that does is 32"):
        check_batch(128, 30)
    with pytest.raises(UserError, match="set gradient_accumulation_steps = 8"):
        check_batch(128, 16, 4)
    with pytest.raises(UserError, match="at least 2"):
        check_batch(1, 1)


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_a_record_holds_the_pools_figures_and_the_trainers(tmp_path, tokenizer):
    trainer, records = make_trainer(tmp_path, tokenizer, MemorySource([make_batch(4)]), max_steps=1)
    trainer.train()
    record = records[0]
    assert record["step"] == 1
    assert record["reward/mean"] == 0.25
    assert record["pool/occupancy"] == 40.0
    assert record["trainer/wait_seconds"] >= 0
    assert record["trainer/step_seconds"] > 0
    assert record["entropy"] > 0
    sampled = [sample.trajectory.sampled_versions() for sample in make_batch(4).samples]
    assert record["trainer/token_lag"] == pytest.approx(4 - np.concatenate(sampled).mean())
    assert trainer.state.log_history[0]["reward/mean"] == 0.25


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, tokenizer):
    batches = [make_batch(i) for i in range(4)]
    whole = MemorySource(batches)
    trainer, records = make_trainer(tmp_path / "a", tokenizer, whole, max_steps=4, save_steps=2)
    trainer.train()

    resumed, published = MemorySource(batches), []
    trainer, later = make_trainer(
        tmp_path / "b",
        tokenizer,
        resumed,
        model=tiny_model(seed=9),
        max_steps=4,
        publish_at_start=lambda weights: published.append({name: t.clone() for name, t in weights.items()}),
    )
    trainer.resume(tmp_path / "a" / "checkpoint-2")

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2").state_dict()
    assert published[0].keys() == saved.keys()
    assert all(torch.equal(published[0][name], tensor) for name, tensor in saved.items())
    assert resumed.events == ["draw", "publish 3", "draw", "publish 4"]
    assert [record["step"] for record in later] == [3, 4]
    for name, tensor in whole.weights.items():
        assert torch.allclose(resumed.weights[name], tensor, rtol=0, atol=1e-6), name
    for one, other in zip(records[2:], later, strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_a_torn_checkpoint_does_not_count_and_two_whole_ones_are_kept(tmp_path, tokenizer):
    source = MemorySource([make_batch(i) for i in range(4)])
    trainer, _ = make_trainer(tmp_path, tokenizer, source, max_steps=4, save_steps=1, save_total_limit=1)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    weights = tmp_path / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    with pytest.raises(UserError, match="not whole"):
        trainer.resume(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-3" / "COMPLETE").unlink()
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match="no checkpoint folder"):
        trainer.resume(tmp_path / "checkpoint-7")


def test_removing_old_checkpoints_leaves_torn_ones_alone_until_a_newer_one_counts(tmp_path, tokenizer):
    trainer, _ = make_trainer(tmp_path, tokenizer, MemorySource([make_batch(0)]), max_steps=1, save_steps=1)
    trainer.train()
    whole = tmp_path / "checkpoint-1"
    shutil.copytree(whole, tmp_path / "checkpoint-2", ignore=shutil.ignore_patterns("COMPLETE"))
    remove_old(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    shutil.copytree(whole, tmp_path / "checkpoint-3")
    remove_old(tmp_path, 1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


# ---- weights --------------------------------------------------------------------------------------------------------


# PEFT reads a name that newer transformers deprecates.
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


@OLD_NAME
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_adapters_are_published_merged_under_plain_names(tmp_path, tokenizer, kind):
    source = MemorySource([make_batch(i) for i in range(2)])
    trainer, _ = make_trainer(tmp_path, tokenizer, source, model=tiny_model(kind), peft_config=LORA)
    trainer.train()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    weights = published_weights(trainer.model)
    assert weights.keys() == tiny_model(kind).state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())

    trainer.save_final(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    merged = copy.deepcopy(trainer.model).merge_and_unload().state_dict()
    start = tiny_model(kind).state_dict()
    assert merged.keys() == weights.keys()
    for name, tensor in merged.items():
        assert torch.equal(weights[name], tensor), name
        assert torch.equal(source.weights[name], tensor), name
        assert torch.equal(loaded[name], tensor), name
    assert not torch.equal(
        weights["model.layers.0.self_attn.q_proj.weight"], start["model.layers.0.self_attn.q_proj.weight"]
    )


@OLD_NAME
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_that_can_not_be_merged_is_refused(tmp_path, tokenizer):
    on_tied = LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    with pytest.raises(UserError, match=r"lm_head.weight is tied"):
        make_trainer(tmp_path, tokenizer, MemorySource([]), peft_config=on_tied)


@OLD_NAME
def test_an_adapter_run_resumes(tmp_path, tokenizer):
    batches = [make_batch(i) for i in range(4)]
    whole = MemorySource(batches)
    trainer, _ = make_trainer(tmp_path, tokenizer, whole, max_steps=4, save_steps=2, peft_config=LORA)
    trainer.train()
    resumed = MemorySource(batches)
    trainer, _ = make_trainer(tmp_path / "b", tokenizer, resumed, max_steps=4, peft_config=LORA)
    trainer.resume(tmp_path / "checkpoint-2")
    for name, tensor in whole.weights.items():
        assert torch.allclose(resumed.weights[name], tensor, rtol=0, atol=1e-6), name


def test_the_best_model_is_replaced_only_by_a_better_one(tmp_path, tokenizer):
    source = MemorySource([make_batch(0)])
    trainer, _ = make_trainer(tmp_path, tokenizer, source, max_steps=1)
    best = tmp_path / "best"
    assert trainer.save_best(0.4, best)
    trainer.train()
    assert not trainer.save_best(0.4, best)
    old = AutoModelForCausalLM.from_pretrained(best).state_dict()
    assert torch.equal(old["model.norm.weight"], tiny_model().state_dict()["model.norm.weight"])
    assert trainer.save_best(0.5, best)
    new = AutoModelForCausalLM.from_pretrained(best).state_dict()
    assert torch.equal(new["model.norm.weight"], source.weights["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(best).chat_template == tokenizer.chat_template
    assert [path.name for path in tmp_path.glob("best*")] == ["best"]


# ---- options --------------------------------------------------------------------------------------------------------


def test_options_of_a_command_line_become_their_types(tmp_path):
    args = build_config(
        {
            "learning_rate": "4e-4",
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": '{"lr_end": 4e-5, "power": 1.0}',
            "warmup_steps": "5",
            "delta": "none",
            "disable_dropout": "false",
            "report_to": "none",
            "adam_beta2": 0.95,
        },
        output_dir=tmp_path,
        max_steps=10,
        seed=7,
        per_device_train_batch_size=16,
    )
    assert args.learning_rate == 4e-4
    assert args.lr_scheduler_kwargs == {"lr_end": 4e-5, "power": 1.0}
    assert args.warmup_steps == 5
    assert args.delta is None
    assert args.disable_dropout is False
    assert args.seed == 7
    assert args.gradient_checkpointing is False
    assert args.bf16 is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rat": 1e-3}, "unknown option trainer.learning_rat. Did you mean 'learning_rate'?"),
        ({"learning_rate": "fast"}, "trainer.learning_rate = 'fast': must be float"),
        ({"warmup_steps": [5]}, "trainer.warmup_steps"),
        ({"num_iterations": 2}, "trainer.num_iterations has no effect here: a drawn batch is one optimiser step"),
        ({"use_vllm": True}, "trainer.use_vllm has no effect here"),
        ({"loss_type": "dappo"}, "Did you mean 'dapo'?"),
        ({"correction": "decopled"}, "Did you mean 'decoupled'?"),
        ({"correction_cap": 0}, "must be above 0"),
        ({"lr_scheduler_type": "linaer"}, "linaer"),
        ({"lr_scheduler_kwargs": "{lr_end"}, "not JSON"),
        ({"max_steps": 0}, "at least 1"),
    ],
)
def test_a_bad_option_is_named_with_the_closest_one(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        build_config({"max_steps": 3, **options}, output_dir=tmp_path)
    assert message in str(error.value)


def test_the_options_known_are_those_accepted():
    names = trainer_option_names()
    assert {"learning_rate", "correction", "loss_type", "epsilon_high"} <= set(names)
    assert not {"num_iterations", "vllm_mode", "resume_from_checkpoint"} & set(names)
