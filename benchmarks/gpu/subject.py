"""What is examined: servers on their GPUs, and sets of weights that are slightly different."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pace_agent.engine.base import GenerationRequest, SamplingParams
from pace_agent.engine.sglang.engine import SGLangEngine, SGLangOptions
from pace_agent.engine.sglang.serving.launch import ServerOptions, Servers, launch
from pace_agent.engine.sglang.weights.kept import WeightKeeper
from pace_agent.engine.sglang.weights.transports import make_transport

SETS, NOISE = 3, 0.1
"""Sets of weights that versions take in turn: the model's own, and others with noise, a share of a tensor's spread."""
TURNS = 32
SIZES = {"cuda": (512, 256, 1024), "cpu": (160, 32, 256)}
"""Tokens of a turn with updates, tokens of a turn that is timed, context."""


@dataclass(frozen=True, slots=True)
class Place:
    """`gpus` are numbers as nvidia-smi counts them, none on a CPU; `ours` is torch's name of the trainer's device."""

    gpus: tuple[int, ...]
    python: str

    @property
    def kind(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def shared(self) -> bool:
        return len(self.gpus) == 1

    @property
    def servers(self) -> tuple[int, ...]:
        return self.gpus[:-1] or self.gpus

    @property
    def ours(self) -> str:
        return f"cuda:{len(self.gpus) - 1}" if self.gpus else "cpu"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.ours) if self.gpus else "cpu"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined. `folders[v % SETS]` and `models[v % SETS]` are the weights of version v."""

    place: Place
    servers: Servers
    folders: Sequence[Path]
    models: Sequence[Any]
    prompts: Sequence[Sequence[int]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return SIZES[self.place.kind]

    def request(self, name: str, number: int, tokens: int) -> GenerationRequest:
        prompt = self.prompts[number % len(self.prompts)]
        return GenerationRequest(f"{name}-{number}", prompt, SamplingParams(tokens, seed=number))


def make_sets(model: Path, place: Place, folder: Path) -> tuple[list[Path], list[Any]]:
    """The sets of weights, each as a folder and as a model on the trainer's device."""
    from transformers import AutoModelForCausalLM

    folders = [model, *(folder / f"weights-{index}" for index in range(1, SETS))]
    models = []
    for index, each in enumerate(folders):
        made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        if index:
            perturb(made, index)
            made.save_pretrained(each)
        models.append(made.to(place.ours))
    return folders, models


@torch.no_grad()
def perturb(model: Any, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        spread = weight.float().std(correction=0)
        weight.add_((torch.randn(weight.shape, generator=source) * spread * NOISE).to(weight.dtype))


@contextmanager
def subject_of(model: Path, place: Place, folder: Path) -> Iterator[Subject]:
    """The subject over servers that end with the block. Its weights and the servers' logs go to `folder`."""
    with launch(server_options(place), model, folder / "logs") as servers:
        folders, models = make_sets(model, place, folder)
        yield Subject(place, servers, folders, models, make_prompts(model))


def make_prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer.encode(f"Count on: {start}, {start + 1}, ")) for start in range(TURNS)]


def server_options(place: Place) -> ServerOptions:
    return ServerOptions(
        servers=max(1, len(place.servers)),
        gpus=place.servers,
        device="cuda" if place.gpus else "cpu",
        python=place.python,
        args=("--mem-fraction-static", "0.4") if place.shared else (),
        context=SIZES[place.kind][2],
        skip_tokenizer=True,
    )


@asynccontextmanager
async def engine_over(subject: Subject, update: Any, version: int) -> AsyncIterator[SGLangEngine]:
    """An engine over the servers, which have the weights of `version`."""
    folder = subject.folders[version % SETS]
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = SGLangEngine(
        subject.servers.urls,
        options=SGLangOptions(about["vocab_size"], context_length=subject.sizes[2], version=version),
        transport=make_transport(update, subject.place.ours),
        keeper=WeightKeeper(folder, dtype="bfloat16"),
        model=folder,
        keys=subject.servers.keys,
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()
