"""The weights that go to an engine: plain names, adapters merged.

What always holds: the names are those of `AutoModelForCausalLM.from_pretrained(...).state_dict()` for the same
architecture, tied weights under both of their names. Nothing that is trained is touched.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pace_agent.errors import UserError

BASE, SAVED = "base_layer", "modules_to_save"


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` carries PEFT adapters. Loads PEFT only where it must be loaded already."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def published_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights by plain name, without gradient.

    Those of a model without adapters, and all that an adapter doesn't touch, share memory with the model and change
    with the next optimiser step. Adapted weights are merged on copies of their layer, so they equal what PEFT's
    `merge_and_unload` would leave, and repeated publishing adds no rounding to what is trained.
    """
    if not is_adapted(model):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        return dict(_merged(model))


def _merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    merged: dict[str, Tensor] = {}
    owners: list[str] = []
    places: set[int] = set()
    for path, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer = copy.deepcopy(module)
            layer.merge()
            before, after = module.get_base_layer().state_dict(), layer.get_base_layer().state_dict()
        elif isinstance(module, ModulesToSaveWrapper):
            before = module.original_module.state_dict()
            after = module.modules_to_save[module.active_adapters[0]].state_dict()
        else:
            continue
        owners.append(f"{path}.")
        merged |= {f"{path}.{name}": tensor.detach() for name, tensor in after.items()}
        places |= {tensor.data_ptr() for tensor in before.values()}
    for name, tensor in base.state_dict().items():
        if name.startswith(tuple(owners)):
            continue
        if "lora_" in name or f".{BASE}." in name or f".{SAVED}." in name:
            raise UserError(f"the adapter's weight {name} can't be merged for publishing; use plain LoRA")
        if tensor.data_ptr() in places:
            # The tied layer is trained without the adapter's part, so no single weight serves both.
            raise UserError(f"{name} is tied to a layer with an adapter; leave the embedding out of the adapter")
        yield name, tensor.detach()
    yield from merged.items()


def save_folder(model: Any, tokenizer: Any, folder: str) -> None:
    """Write a plain folder that `from_pretrained` loads: config, merged weights, tokenizer with its chat template."""
    base = model.get_base_model() if is_adapted(model) else model
    base.save_pretrained(folder, state_dict=published_weights(model))
    tokenizer.save_pretrained(folder)
