"""Loading a model for the engine, and replacing its weights: all of them or none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pace_agent.engine.base import WeightSource
from pace_agent.errors import EngineError, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_model(path: str | Path, dtype: str = "float32") -> Any:
    """A causal language model in evaluation mode; EngineError says what could not be loaded and why."""
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise EngineError(f"unknown dtype {dtype!r} for the local engine.{did_you_mean(dtype, DTYPES)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=DTYPES[dtype])
    except Exception as error:
        raise EngineError(f"no model could be loaded from {path}: {error}") from error
    return model.eval()


def read_weights(source: WeightSource) -> dict[str, Tensor]:
    """Tensors by name, from a mapping, a safetensors file, or every safetensors file of a folder."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise EngineError(f"no *.safetensors in {path}")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights could not be read from {file}: {error}") from error
    return weights


def replace_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the model after checking all names, shapes and kinds; EngineError before anything changed.

    Every tensor of the model's state must be there, under one of its names where weights are tied, and nothing else.
    Another floating-point type is cast.
    """
    own = model.state_dict()
    unknown = [name for name in weights if name not in own]
    if unknown:
        raise EngineError(f"unknown weight {unknown[0]!r} ({len(unknown)} unknown).{did_you_mean(unknown[0], own)}")
    given = {own[name].data_ptr() for name in weights if own[name].numel()}
    missing = [name for name, old in own.items() if name not in weights and old.data_ptr() not in given]
    if missing:
        raise EngineError(f"weight {missing[0]!r} is missing ({len(missing)} of {len(own)} missing)")
    for name, new in weights.items():
        old = own[name]
        if not isinstance(new, Tensor):
            raise EngineError(f"weight {name!r} is {type(new).__name__}, not a tensor")
        if new.shape != old.shape:
            raise EngineError(f"weight {name!r} has shape {tuple(new.shape)}, the model's is {tuple(old.shape)}")
        if new.dtype != old.dtype and not (new.is_floating_point() and old.is_floating_point()):
            raise EngineError(f"weight {name!r} is {new.dtype}, the model's is {old.dtype}")
    _check_ties(own, weights)
    with torch.no_grad():
        for name, new in weights.items():
            own[name].copy_(new)


def _check_ties(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Two names of one tied tensor must not bring two values."""
    first: dict[int, str] = {}
    for name, new in weights.items():
        other = first.setdefault(own[name].data_ptr(), name)
        if other == name or not own[name].numel() or new.data_ptr() == weights[other].data_ptr():
            continue
        if not torch.allclose(new, weights[other], rtol=0.0, atol=0.0, equal_nan=True):
            raise EngineError(f"weights {other!r} and {name!r} are tied in the model, but differ")
