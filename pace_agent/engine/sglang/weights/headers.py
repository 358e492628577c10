"""What safetensors files hold, read from their headers alone, and whether new weights fit a model. Loads no torch."""

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pace_agent.errors import EngineError, did_you_mean

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
SAFETENSORS_NAMES = {torch: name for name, torch in TORCH_NAMES.items()}
BYTES = {"bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2} | {
    f"{kind}{8 * size}": size for kind in ("int", "uint", "float") for size in (1, 2, 4, 8)
}
OUTPUT = re.compile(r"(^|\.)lm_head\.weight$")
INPUT = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its type in torch's words, its shape, and the bytes of `file` that hold it, where it is in a file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.element_size

    @property
    def element_size(self) -> int:
        return BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return "float" in self.dtype


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder's model, or the file itself. EngineError where there are none."""
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise EngineError(f"{index} can't be read: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineError(f"no *.safetensors in {path}")
    return files


def read_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file or folder by name, in the order of the files."""
    entries: dict[str, Entry] = {}
    for file in weight_files(path):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > 100_000_000:
                    raise ValueError("its header is too long")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                start = 8 + length + about["data_offsets"][0]
                entries[name] = Entry(TORCH_NAMES[about["dtype"]], tuple(about["shape"]), file, start)
            if any(entry.start + entry.size > file.stat().st_size for entry in entries.values() if entry.file == file):
                raise ValueError("it is cut off")
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"weights could not be read from {file}: {error}") from error
    return entries


@dataclass(frozen=True, slots=True)
class Model:
    """The weights that a model folder says its model has."""

    folder: Path
    entries: Mapping[str, Entry]
    tied: bool
    """Whether the output layer is the embedding, so that either name will do."""

    @classmethod
    def read(cls, folder: Path) -> "Model":
        entries = read_entries(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            inner = config.get("text_config") or {}
        except (OSError, ValueError, AttributeError) as error:
            raise EngineError(f"{folder / 'config.json'} can't be read: {error}") from error
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
        return cls(folder, entries, not any(map(OUTPUT.search, entries)) if tied is None else bool(tied))

    def dtypes(self, dtype: str | None) -> dict[str, str | None]:
        """The type in which to keep each weight for a server that computes in `dtype`; None: as it comes.

        A weight that the folder keeps in another type than the bulk has a reason for it, and keeps that.
        """
        if dtype is None:
            return dict.fromkeys(self.entries)
        if dtype not in SAFETENSORS_NAMES:
            raise EngineError(f"unknown dtype {dtype!r} of the weights.{did_you_mean(dtype, SAFETENSORS_NAMES)}")
        sizes: Counter[str] = Counter()
        for entry in self.entries.values():
            sizes[entry.dtype] += entry.size
        bulk = sizes.most_common(1)[0][0]
        return {
            name: dtype if entry.dtype == bulk and entry.is_floating else entry.dtype
            for name, entry in self.entries.items()
        }


def match(given: Mapping[str, Entry], model: Model) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Under which of the given names each weight of the model comes, and pairs of given names that must be equal.

    Every weight must be there, under one of its names where weights are tied, and nothing else; the shape must be the
    model's. Another floating-point type will do. EngineError names the first that does not fit.
    """
    own = model.entries
    partner = _tied_names({*own, *given}) if model.tied else {}
    unknown = [name for name in given if name not in own and partner.get(name) not in own]
    if unknown:
        raise EngineError(f"unknown weight {unknown[0]!r} ({len(unknown)} unknown).{did_you_mean(unknown[0], own)}")
    sources = {name: name if name in given else partner.get(name, "") for name in own}
    missing = [name for name, source in sources.items() if source not in given]
    if missing:
        raise EngineError(f"weight {missing[0]!r} is missing ({len(missing)} of {len(own)} missing)")
    for name, new in given.items():
        old = own[name if name in own else partner[name]]
        if new.shape != old.shape:
            raise EngineError(f"weight {name!r} has shape {new.shape}, the model's is {old.shape}")
        if new.dtype != old.dtype and not (new.is_floating and old.is_floating):
            raise EngineError(f"weight {name!r} is {new.dtype}, the model's is {old.dtype}")
    return sources, [(name, partner[name]) for name in given if OUTPUT.search(name) and partner.get(name) in given]


def _tied_names(names: set[str]) -> dict[str, str]:
    """The input and the output embedding, each by the other's name; empty where it isn't clear which they are."""
    inputs, outputs = ([name for name in names if pattern.search(name)] for pattern in (INPUT, OUTPUT))
    if len(inputs) != 1 or len(outputs) != 1:
        return {}
    return {inputs[0]: outputs[0], outputs[0]: inputs[0]}
