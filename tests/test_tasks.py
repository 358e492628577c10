"""Task sources: determinism, splits that never share a problem, files that are wrong in named places."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from pace_agent.envs import Fields, JsonlTasks, Procedural, Task, load_tasks, make_task
from pace_agent.envs.math_python import KINDS, math_task
from pace_agent.envs.shop.env import shop_task
from pace_agent.envs.tasks import StoredTasks
from pace_agent.errors import UserError
from pace_agent.tasks import TaskQueue, TaskSource


def small_task(rng: random.Random) -> Task:
    a, b = rng.randint(1, 30), rng.randint(1, 30)
    return make_task(f"{a} + {b}?", answer=a + b)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def contents(source: TaskSource, split: Any, count: int) -> set[str]:
    return {source.task(split, index).id for index in range(count)}


def test_train_and_eval_never_share_a_problem_whatever_the_seed() -> None:
    # Few enough contents that both splits are nearly exhausted: a leak would show.
    train = contents(Procedural(small_task, seed=0), "train", 3000)
    held_out = contents(Procedural(small_task, seed=7), "eval", 1000)
    assert len(train) > 700
    assert len(held_out) > 60
    assert not train & held_out


@pytest.mark.parametrize("make", [shop_task, math_task, small_task])
def test_generated_tasks_are_deterministic(make: Any) -> None:
    one, other = Procedural(make, seed=3), Procedural(make, seed=3)
    assert [one.task("train", index) for index in range(20)] == [other.task("train", index) for index in range(20)]
    assert one.task("train", 5) != Procedural(make, seed=4).task("train", 5)
    assert isinstance(one, TaskSource)
    assert one.size("train") is None


def test_a_generator_with_too_few_problems_is_an_error_not_a_hang() -> None:
    source = Procedural(lambda rng: make_task("always the same"))
    with pytest.raises(UserError, match="split in 10000 draws"):
        [source.task(split, 0) for split in ("train", "eval")]


def test_every_kind_of_mathematical_problem_has_its_turn() -> None:
    rng = random.Random(0)
    for kind in KINDS:
        asked = {kind(rng)[0] for _ in range(20)}
        assert len(asked) > 15, kind.__name__


def test_jsonl_rows_become_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tasks.jsonl",
        [
            {"id": "a", "question": "1+1?", "answer": "2", "split": "train", "level": 3},
            "",
            {"id": "b", "question": "1+2?", "answer": "3", "split": "test"},
        ],
    )
    source = load_tasks(str(path))
    assert (source.size("train"), source.size("eval")) == (1, 1)
    task = source.task("train", 0)
    assert (task.id, task.prompt, task.answer, dict(task.data)) == ("a", "1+1?", "2", {"level": 3})
    assert source.task("eval", 0).id == "b"


def test_rows_without_a_split_are_shared_out_by_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"problem {number}"} for number in range(400)]
    source = JsonlTasks(write(tmp_path / "a.jsonl", rows), eval_share=0.25)
    shuffled = JsonlTasks(write(tmp_path / "b.jsonl", rows[::-1]), eval_share=0.25)
    for split in ("train", "eval"):
        size = source.size(split)
        assert size is not None
        assert contents(source, split, size) == contents(shuffled, split, size)
    assert 60 < (source.size("eval") or 0) < 140
    assert (source.size("train") or 0) + (source.size("eval") or 0) == 400
    whole = JsonlTasks(tmp_path / "a.jsonl", split="eval")
    assert (whole.size("train"), whole.size("eval")) == (0, 400)


def test_repeated_problems_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path / "tasks.jsonl",
        [
            {"prompt": "same  problem", "split": "train"},
            {"prompt": "same problem\n", "split": "eval"},
            {"prompt": "other", "split": "eval"},
        ],
    )
    source = JsonlTasks(path)
    assert (source.size("train"), source.size("eval"), source.duplicates) == (1, 1, 1)
    assert "left out 1" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "x"}', "{broken"], r"tasks\.jsonl:2: not a line of JSON"),
        (["[1]"], r":1: expected an object"),
        ([{"promt": "x"}], r":1: no field 'prompt'.*Did you mean 'promt'"),
        ([{"prompt": "  "}], r":1: 'prompt' must be a text"),
        ([{"prompt": "x", "split": "tran"}], r":1: 'split' is 'tran'.*'train'"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": 1}], r":2: id '1' was already given.*:1"),
        ([], r"the file is empty"),
        (["", ""], r"there is no task in it"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        JsonlTasks(write(tmp_path / "tasks.jsonl", rows))


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", [{"prompt": "x", "split": "train"}])
    source = load_tasks(str(path))
    assert load_tasks(str(path)) is source
    write(path, [{"prompt": "x", "split": "train"}, {"prompt": "y", "split": "train"}])
    os.utime(path, ns=(1, 1))
    assert load_tasks(str(path)).size("train") == 2


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", [{"key": 7, "text": "x", "gold": "y", "split": "train"}])
    task = JsonlTasks(path, fields=Fields(id="key", prompt="text", answer="gold")).task("train", 0)
    assert (task.id, task.prompt, task.answer) == ("7", "x", "y")
    with pytest.raises(UserError, match=r"no field 'golf'.*Did you mean 'gold'"):
        JsonlTasks(path, fields=Fields(prompt="text", answer="golf"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("task.jsonl", r"no task file.*Did you mean 'tasks\.jsonl'"), ("tasks.csv", "names no tasks")],
)
def test_a_source_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    write(tmp_path / "tasks.jsonl", [{"prompt": "x"}])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        load_tasks(spec)


def test_data_sets_from_a_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        "train": datasets.Dataset.from_list(
            [{"question": f"q{number}", "answer": str(number)} for number in range(40)]
        ),
        "test": datasets.Dataset.from_list([{"question": f"t{number}", "answer": str(number)} for number in range(5)]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "whole")
    source = load_tasks(f"hf:{tmp_path / 'whole'}")
    assert (source.size("train"), source.size("eval")) == (40, 5)
    assert source.task("eval", 2).prompt == "t2"
    only = load_tasks(f"hf:{tmp_path / 'whole'}:train")
    assert (only.size("train") or 0) + (only.size("eval") or 0) == 40
    assert only.size("eval")
    with pytest.raises(UserError, match=r"no split 'tset'.*Did you mean 'test'"):
        load_tasks(f"hf:{tmp_path / 'whole'}:tset")


def test_stored_tasks_feed_a_queue() -> None:
    source = StoredTasks((f"rows:{n}", {"prompt": f"p{n}"}, "train") for n in range(5))
    queue = TaskQueue(source, seed=1)
    first = [queue.next()[1].prompt for _ in range(5)]
    assert sorted(first) == [f"p{n}" for n in range(5)]
