"""Reading and writing safetensors files tensor by tensor."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace_agent.engine.base import WeightSource
from pace_agent.engine.sglang.weights.headers import SAFETENSORS_NAMES, Entry


class Maps:
    """Files mapped into memory, each once, for as long as this or a tensor of it lives."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}

    def bytes_of(self, entry: Entry) -> Tensor:
        assert entry.file is not None
        if entry.file not in self._files:
            size = entry.file.stat().st_size
            self._files[entry.file] = torch.from_file(str(entry.file), shared=False, size=size, dtype=torch.uint8)
        return self._files[entry.file][entry.start : entry.start + entry.size]

    def tensor(self, entry: Entry) -> Tensor:
        data = self.bytes_of(entry)
        if entry.start % entry.element_size:
            data = data.clone()  # a file of another writer, which did not align it
        dtype: torch.dtype = getattr(torch, entry.dtype)
        return data.view(dtype).reshape(entry.shape)


def write_tensors(
    file: Path,
    source: WeightSource,
    given: Mapping[str, Entry],
    sources: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> None:
    """A safetensors file of the tensors `sources` by name, one at a time in memory, in their `dtypes`."""
    names = sorted(sources, key=lambda name: (-Entry(dtypes[name], ()).element_size, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, entry = end, Entry(dtypes[name], given[sources[name]].shape)
        end += entry.size
        header[name] = {
            "dtype": SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    maps = Maps()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            taken = sources[name]
            tensor = source[taken] if isinstance(source, Mapping) else maps.tensor(given[taken])
            plain = tensor.detach().to("cpu", getattr(torch, dtypes[name])).contiguous()
            data: Any = plain.reshape(-1).view(torch.uint8).numpy()
            stream.write(memoryview(data))
