"""Where an environment's tasks come from: a generator, a JSON lines file, a data set.

What always holds:

* The same split and index give the same task, in every process.
* No problem is in two splits. A problem is its content (prompt and data), not its place: the split of a generated task
  and of a row that names none follows from a hash of its content, so that it is the same for every seed and file.
"""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pace_agent.errors import UserError, did_you_mean
from pace_agent.tasks import TaskSource
from pace_agent.types import Split, Task

_log = logging.getLogger("pace_agent.envs.tasks")

EVAL_SHARE = 0.1
"""Share of the contents that belong to the eval split where nothing else decides."""

_MAX_DRAWS = 10_000


def make_task(prompt: str, answer: Any = None, **data: Any) -> Task:
    """A task whose id and seed follow from its prompt and data."""
    content = content_id(prompt, data)
    return Task(id=content, prompt=prompt, answer=answer, data=data, seed=int(content[:7], 16))


def content_id(prompt: str, data: Mapping[str, Any]) -> str:
    """16 hex digits that name a problem; white space in the prompt does not count."""
    text = json.dumps([" ".join(prompt.split()), data], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def split_of(content: str, eval_share: float = EVAL_SHARE) -> Split:
    """The split that a content belongs to: a uniform hash of it falls below `eval_share` or not."""
    digest = hashlib.sha256(f"split:{content}".encode()).digest()
    return "eval" if int.from_bytes(digest[:7], "big") < eval_share * (1 << 56) else "train"


@dataclass(frozen=True)
class Procedural:
    """Endless tasks from `make(rng)`, a pure function of the generator that it is given.

    `eval_share` is the share of all contents that is set aside for the eval split; a draw that falls into the other
    split is drawn again.
    """

    make: Callable[[random.Random], Task]
    seed: int = 0
    eval_share: float = EVAL_SHARE

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise UserError(f"eval_share must be between 0 and 1, got {self.eval_share}")

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        for draw in range(_MAX_DRAWS):
            task = self.make(random.Random(f"{self.seed}:{split}:{index}:{draw}"))
            if split_of(content_id(task.prompt, task.data), self.eval_share) == split:
                return task
        name = getattr(self.make, "__name__", "the generator")
        raise UserError(f"no task for the {split} split in {_MAX_DRAWS} draws: {name} makes too few")


@dataclass(frozen=True, slots=True)
class Fields:
    """Which keys of a row hold what. Where `prompt` or `answer` is None, the usual names are looked for."""

    id: str = "id"
    prompt: str | None = None
    answer: str | None = None
    split: str = "split"

    PROMPTS = ("prompt", "question", "problem")
    ANSWERS = ("answer", "solution", "target")


_SPLITS: dict[str, Split] = {
    "train": "train",
    "eval": "eval",
    "test": "eval",
    "validation": "eval",
    "valid": "eval",
    "dev": "eval",
}

Row = tuple[str, Mapping[str, Any], Split | None]
"""Where it stands (for messages), its fields, and the split that its place decides."""


class StoredTasks:
    """Finite tasks from rows. A row whose content was seen before is left out and counted in `duplicates`."""

    def __init__(self, rows: Iterable[Row], *, fields: Fields | None = None, eval_share: float = EVAL_SHARE) -> None:
        self.duplicates = 0
        self._splits: dict[Split, list[Task]] = {"train": [], "eval": []}
        contents: set[str] = set()
        ids: dict[str, str] = {}
        name = "tasks"
        for where, row, placed in rows:
            task, named = read_row(where, row, fields or Fields())
            name = where.rsplit(":", 1)[0]
            content = content_id(task.prompt, task.data)
            if content in contents:
                self.duplicates += 1
                continue
            if task.id in ids:
                raise UserError(f"{where}: id {task.id!r} was already given to another problem at {ids[task.id]}")
            contents.add(content)
            ids[task.id] = where
            self._splits[placed or named or split_of(content, eval_share)].append(task)
        if not contents:
            raise UserError(f"{name}: there is no task in it")
        if self.duplicates:
            _log.warning("%s: left out %d tasks that repeat an earlier one", name, self.duplicates)

    def size(self, split: Split) -> int | None:
        return len(self._splits[split])

    def task(self, split: Split, index: int) -> Task:
        return self._splits[split][index]


def read_row(where: str, row: Mapping[str, Any], fields: Fields) -> tuple[Task, Split | None]:
    """One row as a task, and the split that its split field names. UserError names the row and the field."""
    prompt_key = _key(where, row, fields.prompt, Fields.PROMPTS, needed=True)
    answer_key = _key(where, row, fields.answer, Fields.ANSWERS, needed=fields.answer is not None)
    prompt = row[prompt_key]
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: {prompt_key!r} must be a text that is not empty, got {prompt!r}")
    named: Split | None = None
    if fields.split in row:
        if row[fields.split] not in _SPLITS:
            hint = did_you_mean(str(row[fields.split]), _SPLITS)
            raise UserError(f"{where}: {fields.split!r} is {row[fields.split]!r}.{hint}")
        named = _SPLITS[row[fields.split]]
    used = {fields.id, fields.split, prompt_key, answer_key}
    task = make_task(prompt, row.get(answer_key), **{key: value for key, value in row.items() if key not in used})
    return (replace(task, id=str(row[fields.id])) if fields.id in row else task), named


def _key(where: str, row: Mapping[str, Any], given: str | None, usual: tuple[str, ...], *, needed: bool) -> str:
    for key in usual if given is None else (given,):
        if key in row:
            return key
    if needed:
        wanted = repr(given) if given else " or ".join(repr(key) for key in usual)
        raise UserError(f"{where}: no field {wanted}.{did_you_mean(given or usual[0], row)}")
    return usual[0]


class JsonlTasks(StoredTasks):
    """Tasks from a file with one JSON object a line. `split` puts every row into that split, whatever the rows say."""

    def __init__(
        self,
        path: str | Path,
        *,
        fields: Fields | None = None,
        split: Split | None = None,
        eval_share: float = EVAL_SHARE,
    ) -> None:
        super().__init__(_jsonl_rows(Path(path).expanduser(), split), fields=fields, eval_share=eval_share)


def _jsonl_rows(path: Path, split: Split | None) -> Iterator[Row]:
    if not path.is_file():
        near = [each.name for each in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        raise UserError(f"there is no task file {str(path)!r}.{did_you_mean(path.name, near)}")
    with path.open("rb") as lines:
        number = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise UserError(f"{path}:{number}: not a line of JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected an object, got {type(row).__name__}")
            yield f"{path}:{number}", row, split
    if number == 0:
        raise UserError(f"{path}: the file is empty")


class DatasetTasks(StoredTasks):
    """Tasks from a data set by `hf:name`, `hf:name:split` or `hf:name:config:split`; a local folder is a name, too.

    Without a split every split is read: `train` for training, `test` and `validation` for evaluation. Where only one
    split is there or asked for and it is not an evaluation split, contents are shared out by hash.
    """

    def __init__(self, spec: str, *, fields: Fields | None = None, eval_share: float = EVAL_SHARE) -> None:
        super().__init__(_dataset_rows(spec), fields=fields, eval_share=eval_share)


def _dataset_rows(spec: str) -> Iterator[Row]:
    name, _, rest = spec.removeprefix("hf:").partition(":")
    config, _, split = rest.rpartition(":")
    parts = _load_dataset(name, config or None, split or None)
    for part, rows in parts.items():
        base = part.split("[", 1)[0]
        placed = None if len(parts) == 1 and _SPLITS.get(base) != "eval" else _SPLITS.get(base)
        for number, row in enumerate(rows):
            yield f"{spec}:{part}[{number}]", row, placed


def _load_dataset(name: str, config: str | None, split: str | None) -> dict[str, Iterable[Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise UserError("tasks from 'hf:...' need the package 'datasets': pip install datasets") from None
    sliced: str | None = None
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            # A slice (`train[:100]`) is the library's to read; a plain name is looked up here, for a better message.
            sliced = split if split is not None and "[" in split else None
            loaded = datasets.load_dataset(name, config, split=sliced)
    except Exception as error:
        raise UserError(f"'hf:{name}' could not be loaded: {type(error).__name__}: {error}") from error
    parts = dict(loaded.items()) if isinstance(loaded, dict) else {sliced or "train": loaded}
    if split is None:
        return parts
    if split not in parts:
        raise UserError(f"'hf:{name}' has no split {split!r}.{did_you_mean(split, parts)}")
    return {split: parts[split]}


def load_tasks(spec: str, *, fields: Fields | None = None, eval_share: float = EVAL_SHARE) -> TaskSource:
    """The task source that a text names: `file.jsonl` or `hf:name[:config][:split]`.

    Asking again gives the same object as long as the file has not changed: every rollout's environment may ask.
    """
    changed = 0
    if not spec.startswith("hf:"):
        if not spec.endswith((".jsonl", ".ndjson")):
            raise UserError(f"{spec!r} names no tasks: expected 'path/to/file.jsonl' or 'hf:name[:config][:split]'")
        path = Path(spec).expanduser().absolute()
        spec, changed = str(path), path.stat().st_mtime_ns if path.is_file() else 0
    return _load(spec, changed, fields, eval_share)


@lru_cache(maxsize=16)
def _load(spec: str, changed: int, fields: Fields | None, eval_share: float) -> TaskSource:
    kind = DatasetTasks if spec.startswith("hf:") else JsonlTasks
    return kind(spec, fields=fields, eval_share=eval_share)
