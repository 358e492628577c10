"""The grading policy, case by case, and a grader that survives what it is asked to compare."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pace_agent.envs.grading.answers import final_value, is_words, last_box, tidy
from pace_agent.envs.grading.math import Grader, grade, shared_grader
from pace_agent.errors import GraderError

BOMB = "\\boxed{10^{10^{10}}}"


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{3} wait, no: \\boxed{4}", "4"),
        ("\\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed {a \\} b}", "a \\} b"),
        ("\\boxed{\\boxed{7}}", "\\boxed{7}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\fbox{5}", "5"),
        ("\\boxed 5", None),
        ("no box {5}", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_found(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("gold", "value"),
    [("72", "72"), ("48/2 = 24, so 48+24 = 72\n#### 72", "72"), ("it is $\\boxed{72}$.", "72"), (" x ", "x")],
)
def test_the_final_value_of_a_worked_solution(gold: str, value: str) -> None:
    assert final_value(gold) == value


def test_tidy_and_words() -> None:
    assert tidy(" $\\$5.$ ") == "5"
    assert tidy("7.") == "7"
    assert [word for word in ("A", "(B)", "\\text{east}", "New York", "x", "ab", "12", "\\pi") if is_words(word)] == [
        "A",
        "(B)",
        "\\text{east}",
        "New York",
    ]


@pytest.mark.parametrize(
    ("gold", "prediction", "reward"),
    [
        # boxes
        ("\\frac{1}{3}", "\\boxed{\\frac{1}{2}}", 0),
        ("0.5", "\\boxed{\\frac{1}{2}}", 1),
        ("4", "\\boxed{3} wait, no: \\boxed{4}", 1),
        ("3", "\\boxed{3} wait, no: \\boxed{4}", 0),
        ("42", "\\boxed{41, no 42}", 0),
        ("3", "\\boxed{3, 4}", 0),
        ("3", "\\boxed{}", 0),
        ("1", "\\boxed{" + "1+" * 3000 + "1}", 0),
        # which is gold matters
        ("1<x<2", "\\boxed{(1,2)}", 1),
        ("(1,2)", "\\boxed{1<x<2}", 0),
        # choices and words are text
        ("A", "\\boxed{A}", 1),
        ("A", "\\boxed{(A)}", 1),
        ("A", "\\boxed{\\text{a}}", 1),
        ("A", "\\boxed{B}", 0),
        ("A", "A", 0),
        ("east", "\\boxed{\\text{east}}", 1),
        ("east", "\\boxed{seat}", 0),
        # formats
        ("50", "\\boxed{50\\%}", 1),
        ("0.5", "\\boxed{50\\%}", 1),
        ("5 \\text{ cm}", "\\boxed{5 \\text{ m}}", 1),
        ("\\frac13", "\\boxed{0.33333333}", 1),
        ("\\frac13", "\\boxed{0.333}", 0),
        ("1000", "\\boxed{1,000}", 1),
        ("1000", "\\boxed{1e3}", 1),
        ("1024", "\\boxed{2^{10}}", 1),
        ("(1,2)", "\\boxed{[1,2]}", 0),
        ("(1,2)", "\\boxed{\\{1,2\\}}", 1),
        ("3", "\\boxed{\\mathbf{3}}", 1),
        ("3", "\\boxed{x=3}", 1),
        ("-3", "\\boxed{3}", 0),
        ("7", "\\boxed{7.}", 1),
        ("72", "\\boxed{$72}", 1),
        ("12345678901234567890", "\\boxed{12345678901234567891}", 0),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}", 1),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1&2\\\\4&4\\end{pmatrix}}", 0),
        ("2\\sqrt{2}", "\\boxed{\\sqrt8}", 1),
        # no box
        ("72", "72 appears", 0),
        ("72", "", 0),
    ],
)
async def test_policy(gold: str, prediction: str, reward: float) -> None:
    assert await grade(gold=gold, prediction=prediction) == reward


async def test_without_strictness_the_whole_text_is_read() -> None:
    assert await grade(gold="72", prediction="72", strict=False) == 1
    assert await grade(gold="72", prediction="", strict=False) == 0


@pytest.mark.parametrize("gold", ["", "??", "\\frac{", "1" * 5000])
async def test_a_gold_answer_that_cannot_be_read_is_the_data_sets_fault(gold: str) -> None:
    with pytest.raises(GraderError, match="can't be read"):
        await grade(gold=gold, prediction="\\boxed{3}")


async def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        await grade("3", "\\boxed{3}")  # type: ignore[call-arg]


async def test_a_bomb_scores_nothing_and_disturbs_nobody() -> None:
    bomb = asyncio.create_task(grade(gold="3", prediction=BOMB, deadline=1.0))
    rewards = await asyncio.gather(*(grade(gold=str(n), prediction=f"\\boxed{{{n}}}") for n in range(20)))
    assert rewards == [1.0] * 20
    assert await bomb == 0.0
    assert await grade(gold="5", prediction="\\boxed{5}") == 1.0


async def test_cancelling_does_not_wait_for_the_deadline() -> None:
    running = asyncio.create_task(grade(gold="3", prediction=BOMB, deadline=2.0))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await grade(gold="5", prediction="\\boxed{5}") == 1.0


def test_many_threads_and_loops_share_the_grader() -> None:
    rewards: list[float] = []

    def work(number: int) -> None:
        rewards.append(asyncio.run(grade(gold=str(number), prediction=f"\\boxed{{{number}.0}}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == [1.0] * 8
    assert len(shared_grader().pids()) <= 4


@pytest.fixture
def grader() -> Iterator[Grader]:
    made = Grader(workers=1)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_that_dies_is_replaced_and_closing_leaves_none(grader: Grader) -> None:
    assert (await grader.compare("3", "3", 5.0) or {})["equal"]
    (first,) = grader.pids()
    os.kill(first, signal.SIGKILL)
    assert (await grader.compare("4", "4", 5.0) or {})["equal"]
    (second,) = grader.pids()
    assert first != second
    descriptors = len(os.listdir("/proc/self/fd"))
    assert await grader.compare("3", "10^{10^{10}}", 0.2) is None
    assert (await grader.compare("3", "3", 5.0) or {})["equal"]
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    pids = grader.pids()
    grader.close()
    grader.close()
    assert not any(alive(pid) for pid in [first, second, *pids])
    assert grader.pids() == []


async def test_a_worker_that_nobody_waits_for_ends_by_itself(grader: Grader) -> None:
    assert await grader.compare("3", "3", 5.0)
    worker = next(iter(grader._workers))
    assert worker.process.stdin is not None
    worker.process.stdin.write(b'{"gold": "3", "answer": "10^{10^{10}}", "seconds": -1.8}\n')
    worker.process.stdin.flush()
    assert await asyncio.to_thread(worker.process.wait, 60) == -signal.SIGALRM
