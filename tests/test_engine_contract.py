"""What every engine that trains does, run against each: in this process, in a process of its own, scripted, SGLang.

SGLang comes twice: as the fake server, and as the real one on a CPU.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_sglang import FakeServer
from real_sglang import real_sglang
from sglang_engines import sglang_engine
from tiny_models import CONTEXT, VOCAB, make_model, worst_error

from pace_agent.engine.base import Engine, Generation, GenerationRequest, SamplingParams, WeightSource
from pace_agent.engine.local import make_local_engine
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.errors import EngineError
from pace_agent.types import check_spans

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Subject:
    """An engine, the models behind its versions (none when scripted), and the next version to publish.

    `tolerance` is for log-probabilities; without one they are not a model's. `head_start` seconds after a turn began it
    has tokens.
    """

    engine: Engine
    models: dict[int, Any]
    version: int = 0
    tolerance: float | None = 1e-4
    head_start: float = 0.05

    def check_logprobs(self, request: GenerationRequest, generation: Generation) -> None:
        if self.models and self.tolerance is not None:
            assert worst_error(self.models, request, generation) < self.tolerance

    async def update(self, source: Callable[[Any], WeightSource] = lambda model: model.state_dict()) -> None:
        """Publish the next version; `source` makes the weights from its model."""
        self.version += 1
        weights: WeightSource = {}
        if self.models:
            self.models[self.version] = make_model(self.version)
            weights = source(self.models[self.version])
        await self.engine.update_weights(weights, self.version)


def ask(rid: str, tokens: int, *, seed: int = 0, session: str = "", start: int = 1) -> GenerationRequest:
    return GenerationRequest(rid, list(range(start, start + 12)), SamplingParams(tokens, seed=seed), session)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the engine's counters are all there is to wait for
            await asyncio.sleep(0.005)


async def all_running(subject: Subject, tasks: list[asyncio.Task[Any]]) -> None:
    """Let the turns of `tasks` begin, and none of them end."""
    await until(lambda: subject.engine.stats().running >= len(tasks))
    await asyncio.sleep(subject.head_start)
    assert not any(task.done() for task in tasks)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Subject]:
    """A subject of that kind; what it needs is started, and stopped in the end."""
    if kind == "scripted":
        scripted = ScriptedEngine(
            lambda r: [5] * (r.sampling.max_new_tokens + 1),
            vocab_size=VOCAB,
            context_length=CONTEXT,
            token_seconds=0.01,
        )
        yield Subject(scripted, {})
        return
    models = {0: make_model(0)}
    models[0].save_pretrained(folder / "model")
    if kind == "sglang-fake":
        async with FakeServer(vocab_size=VOCAB, context_length=CONTEXT, token_seconds=0.01) as fake:
            yield Subject(sglang_engine([fake.url], folder / "model"), models, tolerance=None)
    elif kind == "sglang-real":
        with real_sglang(folder / "model", folder, "--dtype", "float32", "--incremental-streaming-output") as real:
            real.post("/slow_down", {"forward_sleep_time": 0.02})
            yield Subject(sglang_engine([real.url], folder / "model"), models, tolerance=1e-3, head_start=1.0)
    else:
        yield Subject(make_local_engine(folder / "model", process=kind == "process", max_slots=16), models)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["inprocess", "process", "scripted", "sglang-fake", "sglang-real"]
)
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    async with opened(request.param, tmp_path_factory.mktemp("engine")) as made:
        info = await made.engine.start()
        assert (info.vocab_size, info.version) == (VOCAB, 0)
        assert CONTEXT - 6 <= info.context_length <= CONTEXT  # SGLang keeps a few for itself
        yield made
        await made.engine.aclose()
        with pytest.raises(EngineError):
            await made.engine.generate(ask("late", 1))


async def test_turns_are_stamped_and_their_logprobs_exact(subject: Subject) -> None:
    requests = [ask(f"stamped-{i}", 3 + i, seed=i, start=i % 3) for i in range(20)]
    done = await asyncio.gather(*(subject.engine.generate(request) for request in requests))
    for request, generation in zip(requests, done, strict=True):
        assert len(generation.output_ids) == request.sampling.max_new_tokens
        assert (generation.finish, generation.segments) == ("length", 1)
        check_spans(generation.spans, len(generation.output_ids))
        subject.check_logprobs(request, generation)


async def test_an_update_is_refused_while_running(subject: Subject) -> None:
    with pytest.raises(EngineError, match="only while the engine is paused"):
        await subject.engine.update_weights({}, subject.version + 1)


async def test_an_update_splits_turns_and_both_sides_are_exact(subject: Subject, tmp_path: Path) -> None:
    def as_folder(model: Any) -> Path:
        model.save_pretrained(tmp_path)
        return tmp_path

    first = subject.version
    requests = [ask(f"split-{i}", 140, seed=i) for i in range(8)]
    tasks = [asyncio.create_task(subject.engine.generate(request)) for request in requests]
    for source in (lambda model: model.state_dict(), as_folder):
        await all_running(subject, tasks)
        await subject.engine.pause()
        await subject.update(source)
        await subject.engine.resume()
    done = await asyncio.gather(*tasks)
    for request, generation in zip(requests, done, strict=True):
        assert len(generation.output_ids) == 140
        check_spans(generation.spans, 140)
        assert generation.spans[-1].version == first + 2
        assert generation.segments == len(generation.spans)
        subject.check_logprobs(request, generation)
    assert {len(generation.spans) for generation in done} <= {2, 3}
    stats = subject.engine.stats()
    assert stats.interrupted >= 8
    assert stats.updates == subject.version
    assert stats.paused_seconds > 0.0


async def test_nothing_is_sampled_while_paused(subject: Subject) -> None:
    await subject.engine.pause()
    task = asyncio.create_task(subject.engine.generate(ask("paused", 2)))
    before = subject.engine.stats().sampled_tokens
    await asyncio.sleep(0.2)
    assert not task.done()
    assert subject.engine.stats().sampled_tokens == before
    await subject.update()
    await subject.engine.resume()
    generation = await task
    assert [span.version for span in generation.spans] == [subject.version]
    assert generation.segments == 1


async def test_abort_returns_the_tokens_so_far(subject: Subject) -> None:
    await subject.engine.abort("unknown")
    tasks = [asyncio.create_task(subject.engine.generate(ask(f"cut-{i}", 140, seed=i))) for i in range(3)]
    await all_running(subject, tasks)
    await subject.engine.abort("cut-1")
    cut = await tasks[1]
    assert cut.finish == "abort"
    assert 0 < len(cut.output_ids) == len(cut.logprobs) < 140
    await subject.engine.pause()
    await subject.engine.abort()
    for task in (tasks[0], tasks[2]):
        generation = await task
        assert generation.finish == "abort"
        assert len(generation.output_ids) > 0
    waiting = asyncio.create_task(subject.engine.generate(ask("gate", 5)))
    await until(lambda: subject.engine.stats().running == 1)
    await subject.engine.abort("gate")
    assert (await waiting).output_ids == ()
    await subject.engine.resume()


async def test_cancelling_frees_the_name_and_the_engine_goes_on(subject: Subject) -> None:
    task = asyncio.create_task(subject.engine.generate(ask("cancelled", 140, session="c")))
    await all_running(subject, [task])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    generation = await subject.engine.generate(ask("cancelled", 4, session="c"))
    assert (generation.finish, len(generation.output_ids)) == ("length", 4)
    await subject.engine.release("c")
    await subject.engine.release("never seen")


@pytest.mark.parametrize(
    ("ids", "words"), [([1, VOCAB], f"id {VOCAB} is outside"), ([], "no input ids"), ([1] * CONTEXT, "no room")]
)
async def test_a_bad_request_fails_alone(subject: Subject, ids: list[int], words: str) -> None:
    good = asyncio.create_task(subject.engine.generate(ask("good", 10)))
    with pytest.raises(EngineError, match=words):
        await subject.engine.generate(GenerationRequest("bad", ids, SamplingParams(3)))
    assert len((await good).output_ids) == 10


async def test_one_name_runs_once(subject: Subject) -> None:
    first = asyncio.create_task(subject.engine.generate(ask("same", 20)))
    await until(lambda: subject.engine.stats().running == 1)
    with pytest.raises(EngineError, match="'same' is already running"):
        await subject.engine.generate(ask("same", 20))
    assert len((await first).output_ids) == 20


async def test_versions_never_fall(subject: Subject) -> None:
    await subject.engine.pause()
    await subject.update()
    with pytest.raises(EngineError, match="below the engine's version"):
        await subject.engine.update_weights({}, subject.version - 1)
    await subject.engine.resume()
    generation = await subject.engine.generate(ask("after", 3))
    assert generation.spans[0].version == subject.version


async def refused(update: Awaitable[None], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        await update


async def test_an_update_is_all_or_nothing(subject: Subject, tmp_path: Path) -> None:
    if not subject.models:
        pytest.skip("a scripted engine has no weights")
    weights = make_model(99).state_dict()
    name = next(iter(weights))
    update, version = subject.engine.update_weights, subject.version + 1
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00\x00")
    await subject.engine.pause()
    await refused(update({k: v for k, v in weights.items() if k in (name, "lm_head.weight")}, version), "is missing")
    await refused(update({**weights, "model.norm.weights": weights["model.norm.weight"]}, version), "Did you mean")
    await refused(update({**weights, "model.norm.weight": weights["model.norm.weight"][1:]}, version), "has shape")
    await refused(update(tmp_path / "nowhere", version), "nowhere")
    await refused(update(tmp_path / "torn.safetensors", version), "could not be read")
    await subject.engine.resume()
    request = ask("unharmed", 8)
    generation = await subject.engine.generate(request)
    assert generation.spans[0].version == subject.version
    subject.check_logprobs(request, generation)


async def test_turns_of_a_session_go_on_across_an_update(subject: Subject) -> None:
    ids = list(range(1, 20))
    for turn in range(3):
        request = GenerationRequest(f"turn-{turn}", list(ids), SamplingParams(6, seed=turn), session="rollout")
        generation = await subject.engine.generate(request)
        subject.check_logprobs(request, generation)
        ids += [*generation.output_ids, 3, 4]
        await subject.engine.pause()
        await subject.update()
        await subject.engine.resume()
    await subject.engine.release("rollout")
