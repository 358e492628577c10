"""New weights as a folder that SGLang loads: checked against the model, and kept until nobody needs them.

What always holds:

* A kept folder is whole: it is written under another name and then renamed.
* Weights that don't fit the model are refused before there is a folder.
* Nothing stays behind: a folder goes with `delete`, with `WeightKeeper.close`, with the process when it exits, or, when
  it was killed, with the next keeper on this machine in the same place.

What is kept by a link must not be written to in place by whoever made it; replacing or deleting it is fine.
"""

import itertools
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace_agent.engine.base import WeightSource
from pace_agent.engine.sglang.weights.headers import SAFETENSORS_NAMES, Entry, Model, match, read_entries, weight_files
from pace_agent.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_numbers = itertools.count()


class KeptWeights:
    """The weights of one version in `folder`. `entries` are the model's own names, and where each tensor lies."""

    def __init__(self, folder: Path, version: int, entries: Mapping[str, Entry]) -> None:
        self.folder = folder
        self.version = version
        self.entries = entries
        self._delete = weakref.finalize(self, _delete, folder, os.getpid())

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    def buckets(self, most_bytes: int) -> list[list[str]]:
        """All names, in groups of at most so many bytes; a larger tensor is a group of its own.

        Within a group larger elements come first, so that tensors packed end to end are aligned.
        """
        groups: list[list[str]] = [[]]
        filled = 0
        for name, entry in self.entries.items():
            if groups[-1] and filled + entry.size > most_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += entry.size
        return [sorted(group, key=lambda name: -self.entries[name].element_size) for group in groups if group]

    def pack(self, names: Sequence[str], flat: "Tensor") -> None:
        """Copy tensors end to end into `flat`, bytes as long as all of them."""
        from pace_agent.engine.sglang.weights.tensor_files import Maps

        maps = Maps()
        position = 0
        for name in names:
            entry = self.entries[name]
            flat[position : position + entry.size] = maps.bytes_of(entry)
            position += entry.size

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Each tensor by name, mapped from the folder and read when it is used."""
        from pace_agent.engine.sglang.weights.tensor_files import Maps

        maps = Maps()
        return ((name, maps.tensor(entry)) for name, entry in self.entries.items())

    @property
    def deleted(self) -> bool:
        return not self._delete.alive

    def delete(self) -> None:
        """Remove the folder. What is mapped stays readable. Twice is fine."""
        self._delete()


class WeightKeeper:
    """Keeps weights for the model in the folder `model`, in `folder`; without one in shared memory where they fit.

    Weights are kept in `dtype`, that of the servers; without one as they come. All methods block.
    """

    def __init__(self, model: Path, *, folder: Path | None = None, dtype: str | None = None) -> None:
        self._model = Model.read(model)
        self._dtypes = self._model.dtypes(dtype)
        self._folder = folder
        self._kept: list[KeptWeights] = []
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EngineError(f"the folder for weights {folder} can't be made: {error}") from error
        for place in [folder] if folder is not None else [SHARED_MEMORY, Path(tempfile.gettempdir())]:
            remove_leftovers(place)

    def keep(self, source: WeightSource, version: int) -> KeptWeights:
        """Check and keep weights. EngineError says what doesn't fit the model, or why they can't be kept."""
        given = _described(source) if isinstance(source, Mapping) else read_entries(Path(source))
        sources, equal = match(given, self._model)
        _check_ties(source, given, equal)
        dtypes = {name: self._dtypes[name] or given[taken].dtype for name, taken in sources.items()}
        as_it_is = all(name == taken and given[taken].dtype == dtypes[name] for name, taken in sources.items())
        size = sum(Entry(dtypes[name], entry.shape).size for name, entry in self._model.entries.items())
        place = self._folder or _roomy(source, size, linked=as_it_is)
        name = f"pace-kept-{_host()}-{os.getpid()}-{next(_numbers)}-v{version}"
        draft, folder = place / f".{name}", place / name
        try:
            draft.mkdir()
            self._copy_config(draft)
            if as_it_is and not isinstance(source, Mapping):
                for file in weight_files(Path(source)):
                    _link(file, draft / _loadable(file.name))
            else:
                from pace_agent.engine.sglang.weights.tensor_files import write_tensors

                write_tensors(draft / "model.safetensors", source, given, sources, dtypes)
            entries = read_entries(draft)
            draft.rename(folder)
        except OSError as error:
            raise EngineError(f"weights could not be kept in {folder}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        moved = {
            name: Entry(entry.dtype, entry.shape, folder / entry.file.name, entry.start)
            for name, entry in entries.items()
            if name in self._model.entries and entry.file is not None
        }
        kept = KeptWeights(folder, version, moved)
        self._kept = [*(each for each in self._kept if not each.deleted), kept]
        return kept

    def close(self) -> None:
        """Delete all that is still kept."""
        for kept in self._kept:
            kept.delete()
        self._kept = []

    def _copy_config(self, to: Path) -> None:
        for file in self._model.folder.iterdir():
            if file.is_file() and file.suffix in BESIDE_WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, to / file.name)


def remove_leftovers(place: Path) -> None:
    """Remove what processes of this machine kept here that no longer live."""
    pattern = re.compile(rf"\.?pace-kept-{re.escape(_host())}-(\d+)-\d+-v\d+")
    with suppress(OSError):
        for path in place.iterdir():
            found = pattern.fullmatch(path.name)
            if found and not _lives(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _described(weights: Mapping[str, Any]) -> dict[str, Entry]:
    import torch

    entries = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise EngineError(f"weight {name!r} is {type(tensor).__name__}, not a tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in SAFETENSORS_NAMES:
            raise EngineError(f"weight {name!r} is {dtype}, which safetensors can't hold")
        entries[name] = Entry(dtype, tuple(tensor.shape))
    return entries


def _check_ties(source: WeightSource, given: Mapping[str, Entry], pairs: Sequence[tuple[str, str]]) -> None:
    """Two names of one tied tensor must not bring two values."""
    import torch

    from pace_agent.engine.sglang.weights.tensor_files import Maps

    maps = Maps()
    for pair in pairs:
        one, other = (source[name] if isinstance(source, Mapping) else maps.tensor(given[name]) for name in pair)
        same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
        if not same and not torch.allclose(one, other.to(one), rtol=0.0, atol=0.0, equal_nan=True):
            raise EngineError(f"weights {pair[1]!r} and {pair[0]!r} are tied in the model, but differ")


def _roomy(source: WeightSource, size: int, *, linked: bool) -> Path:
    """Shared memory where `size` bytes fit, or already are; else the temporary folder."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    there = linked and not isinstance(source, Mapping) and SHARED_MEMORY in Path(source).resolve().parents
    fits = there or shutil.disk_usage(SHARED_MEMORY).free > size * 1.1 + (1 << 20)
    return SHARED_MEMORY if fits else Path(tempfile.gettempdir())


def _link(file: Path, to: Path) -> None:
    try:
        os.link(os.path.realpath(file), to)
    except OSError:  # on another filesystem, or one that has no links
        shutil.copyfile(file, to)


def _loadable(name: str) -> str:
    """SGLang looks for *.safetensors; a lone file may have any name."""
    return name if name.endswith(".safetensors") else "model.safetensors"


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _delete(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not of the folder
        shutil.rmtree(folder, ignore_errors=True)
