"""A tiny Qwen3 model from nothing: tokenizer, random weights, supervised steps on conversations, one folder.

The folder is what `from_pretrained` loads: config, weights in bfloat16, tokenizer with its chat template. The same
conversations and seed give the same weights on the same kind of processor: one thread computes, one seed decides.

It does not promise to be a good model. It is a place for reinforcement learning to start from, and as good as the
conversations are.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pace_agent.chat.format import ChatFormat
from pace_agent.trainers.small_tokenizer import plain_texts, train_tokenizer
from pace_agent.types import Message

OnStep = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats per token."""

BETAS = (0.9, 0.98)
WARM_UP_STEPS = 20
BUCKET_BATCHES = 16
"""Batches whose examples are sorted by length together: nearly no padding, and still a fresh mix every time."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen3 model with tied embeddings. The default has 0.66 million parameters."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    vocabulary: int = 512
    """At most; the tokenizer decides."""
    context: int = 512


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as ids; `mask` is 1 where the assistant speaks, its end-of-turn token included."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def make_warm_start(
    conversations: Sequence[Sequence[Message]],
    out_dir: Path,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    shape: ModelShape | None = None,
    steps: int = 600,
    batch_size: int = 32,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Path:
    """Train a model of `shape` on `conversations` for `steps` steps and save it to `out_dir`, which is returned.

    `tools` are the JSON schemas that the template shows. The loss is the mean over the assistant's tokens of a batch.
    ValueError when there is no conversation, or one is longer than the context.
    """
    if not conversations:
        raise ValueError("a warm start needs at least one conversation")
    shape = shape or ModelShape()
    tokenizer = train_tokenizer(
        plain_texts(conversations, tools),
        size=shape.vocabulary,
        max_length=shape.context,
    )
    chat = ChatFormat(tokenizer)
    examples = [encode(chat, conversation, tools) for conversation in conversations]
    longest = max(len(example.ids) for example in examples)
    if longest > shape.context:
        raise ValueError(f"a conversation has {longest} tokens, the context holds {shape.context}")
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(tokenizer, shape)
        _fit(model, examples, steps, batch_size, learning_rate, random.Random(seed), on_step)
    model.to(torch.bfloat16).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def encode(chat: ChatFormat, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Example:
    """The ids of a whole conversation, put together piece by piece as a rollout puts them together.

    The content of an assistant's message is the whole text of the turn, calls included. What follows the last turn is
    left out. ValueError where there is none.
    """
    ids: list[int] = []
    mask: list[int] = []
    said: list[Message] = []
    turn: list[int] = []
    for message in conversation:
        if message.role != "assistant":
            said.append(message)
            continue
        heard = chat.suffix_ids(said, last_output=turn) if turn else chat.prompt_ids(said, tools)
        turn = [*chat.tokenizer.encode(message.content, add_special_tokens=False), chat.stop_token_ids[0]]
        ids += heard + turn
        mask += [0] * len(heard) + [1] * len(turn)
        said = []
    if not turn:
        raise ValueError("a conversation has no turn of the assistant")
    return Example(tuple(ids), tuple(mask))


def new_model(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> Qwen3ForCausalLM:
    """Random weights from torch's current seed, in float32."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model


def _fit(
    model: Qwen3ForCausalLM,
    examples: Sequence[Example],
    steps: int,
    batch_size: int,
    learning_rate: float,
    rng: random.Random,
    on_step: OnStep | None,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
    batches = _batches(examples, batch_size, rng)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, steps)
        loss = _loss(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1, steps, loss.item())
    model.eval()


def _loss(model: Qwen3ForCausalLM, batch: Sequence[Example]) -> Tensor:
    """Cross entropy in nats, mean over the assistant's tokens; only their positions are scored."""
    width = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + (0,) * (width - len(example.ids)) for example in batch])
    mask = torch.tensor([example.mask + (0,) * (width - len(example.mask)) for example in batch]).bool()
    # Padding stands on the right, where causal attention never looks back at it from a token that counts.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = mask[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][chosen]), ids[:, 1:][chosen])


def _schedule(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine to a tenth; in (0, 1]."""
    warm_up = min(WARM_UP_STEPS, steps // 10)
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    done = (step - warm_up) / max(steps - warm_up, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _batches(examples: Sequence[Example], batch_size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches without end, each of examples of about one length."""
    window = batch_size * BUCKET_BATCHES
    waiting: list[Example] = []
    while True:
        while len(waiting) < window:
            waiting += rng.sample(examples, len(examples))
        taken, waiting = sorted(waiting[:window], key=lambda example: len(example.ids)), waiting[window:]
        batches = [taken[start : start + batch_size] for start in range(0, window, batch_size)]
        rng.shuffle(batches)
        yield from batches


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: small products gain nothing from more, and sums in one order repeat."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
