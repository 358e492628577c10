"""Turns on the engine: whether its promises are kept, how many tokens a second, what an update costs."""

import asyncio
import copy
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from subject import SETS, TURNS, Subject, engine_over
from tables import Row, show

from pace_agent.engine.base import Engine, Generation, GenerationRequest, SamplingParams
from pace_agent.errors import EngineError, PaceError
from pace_agent.types import check_spans

UPDATES = 3
LOADS = (1, 32, 256)
FAR, MOST_MEAN, MOST_SHARE = 0.05, 0.05, 0.5
"""A difference that is counted; bounds of the mean: in nats, and as a share of that under another version's weights."""


async def promises(subject: Subject, engine: Engine) -> list[Row]:
    """Each promise, and whether it was kept; an error of the engine breaks the one that it came in."""
    rows = []
    for promise in (abort_keeps_tokens, cancel_frees_the_name, a_pause_holds, a_bad_id_fails_alone):
        try:
            async with asyncio.timeout(120):
                kept = await promise(subject, engine)
                said = ""
        except (PaceError, TimeoutError) as error:
            kept, said = False, f"{type(error).__name__}: {error}"
        rows.append({"promise": promise.__name__.replace("_", " "), "kept": kept, "error": said})
    return rows


def begun(subject: Subject, engine: Engine, name: str, count: int, tokens: int) -> list[asyncio.Task[Generation]]:
    requests = [subject.request(name, number, tokens) for number in range(count)]
    return [asyncio.create_task(engine.generate(request)) for request in requests]


async def abort_keeps_tokens(subject: Subject, engine: Engine) -> bool:
    tokens = subject.sizes[0]
    tasks = begun(subject, engine, "abort", 4, tokens)
    await asyncio.sleep(0.5)
    await engine.abort("abort-1")
    await engine.abort("nobody")
    cut = await tasks[1]
    others = await asyncio.gather(tasks[0], *tasks[2:])
    whole = all((each.finish, len(each.output_ids)) == ("length", tokens) for each in others)
    return whole and cut.finish == "abort" and 0 < len(cut.output_ids) == len(cut.logprobs) < tokens


async def cancel_frees_the_name(subject: Subject, engine: Engine) -> bool:
    (task,) = begun(subject, engine, "cancel", 1, subject.sizes[0])
    await asyncio.sleep(0.3)
    cancelled = task.cancel()
    await asyncio.wait({task})
    again = await engine.generate(subject.request("cancel", 0, 4))
    return cancelled and task.cancelled() and len(again.output_ids) == 4


async def a_pause_holds(subject: Subject, engine: Engine) -> bool:
    """Neither what ran before it nor what came in it brings a token, and all of it ends well afterwards."""
    tokens = subject.sizes[0]
    tasks = begun(subject, engine, "before", 4, tokens)
    await asyncio.sleep(0.3)
    await engine.pause()
    tasks += begun(subject, engine, "during", 4, 8)
    await asyncio.sleep(0.2)
    sampled = engine.stats().sampled_tokens
    await asyncio.sleep(2.0)
    held = engine.stats().sampled_tokens == sampled and not any(task.done() for task in tasks)
    await engine.resume()
    done = await asyncio.gather(*tasks)
    for each in done:
        check_spans(each.spans, len(each.output_ids))
    return held and [len(each.output_ids) for each in done] == [tokens] * 4 + [8] * 4


async def a_bad_id_fails_alone(subject: Subject, engine: Engine) -> bool:
    (good,) = begun(subject, engine, "good", 1, 16)
    try:
        await engine.generate(GenerationRequest("bad", [1, 1 << 30], SamplingParams(4)))
    except EngineError:
        return len((await good).output_ids) == 16
    return False


async def speed(subject: Subject, engine: Engine, turns: int) -> Row:
    tokens, started = subject.sizes[1], time.monotonic()
    done = await asyncio.gather(*begun(subject, engine, f"speed-{turns}", turns, tokens))
    seconds = time.monotonic() - started
    sampled = sum(len(each.output_ids) for each in done)
    return {"turns at once": turns, "tokens": sampled, "seconds": seconds, "tokens/s": sampled / seconds}


async def updates(subject: Subject, engine: Engine, update: str, version: int) -> Row:
    """Turns with updates in their middle: `version` is what they begin with."""
    tokens = subject.sizes[0]
    started = time.monotonic()
    await asyncio.gather(*begun(subject, engine, "plain", TURNS, tokens))
    rest = (time.monotonic() - started) / (UPDATES + 1)
    requests = [subject.request(update, number, tokens) for number in range(TURNS)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    times = []
    for new in range(version + 1, version + UPDATES + 1):
        await asyncio.sleep(rest)
        before = engine.stats()
        await engine.pause()
        await engine.update_weights(subject.models[new % SETS].state_dict(), new)
        await engine.resume()
        after = engine.stats()
        times.append((after.update_seconds - before.update_seconds, after.paused_seconds - before.paused_seconds))
    done = await asyncio.gather(*tasks)
    own, other = await asyncio.to_thread(differences, subject, requests, done)
    versions = range(version, version + UPDATES + 1)
    whole = all(sound(each, tokens) for each in done) and all(s.version in versions for d in done for s in d.spans)
    split = sum(len(each.spans) > 1 for each in done) / TURNS
    mean, control = fmean(own), fmean(other)
    return {
        "transport": update,
        "kept": whole and split > 0.5 and mean < min(MOST_MEAN, MOST_SHARE * control),
        "interrupted": split,
        "first update s": times[0][0],
        "later updates s": fmean(seconds for seconds, _ in times[1:]),
        "paused s": fmean(seconds for _, seconds in times),
        "worst": max(own),
        "mean": mean,
        f"above {FAR}": sum(each > FAR for each in own) / len(own),
        "mean, other weights": control,
        "mean, rounding": await asyncio.to_thread(rounding, subject, requests, done),
    }


def sound(generation: Generation, tokens: int) -> bool:
    """Whole, and its spans contiguous with versions that never fall."""
    try:
        check_spans(generation.spans, len(generation.output_ids))
    except ValueError:
        return False
    return len(generation.output_ids) == len(generation.logprobs) == tokens


@torch.no_grad()
def differences(
    subject: Subject, requests: Sequence[GenerationRequest], done: Sequence[Generation]
) -> tuple[list[float], list[float]]:
    """Of each token's log-probability from that under the weights of its stamp, and under those of the next version."""
    own, other = [], []
    for request, generation in zip(requests, done, strict=True):
        ids = torch.tensor([[*request.input_ids, *generation.output_ids]], device=subject.place.ours)
        given = torch.tensor(generation.logprobs)
        gaps = [(logprobs(model, ids, len(given)) - given).abs() for model in subject.models]
        for span in generation.spans:
            own += gaps[span.version % SETS][span.start : span.end].tolist()
            other += gaps[(span.version + 1) % SETS][span.start : span.end].tolist()
    return own, other


def logprobs(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Of the last `count` of `ids`, (1, tokens): float32 on the CPU, (count,)."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, -count:, None])[:, 0].cpu()


@torch.no_grad()
def rounding(subject: Subject, requests: Sequence[GenerationRequest], done: Sequence[Generation]) -> float:
    """Mean difference between the model in bfloat16 and in float32, on a few of the same tokens."""
    model, gaps = subject.models[0], []
    exact = copy.deepcopy(model).float()
    for request, generation in list(zip(requests, done, strict=True))[:4]:
        ids = torch.tensor([[*request.input_ids, *generation.output_ids]], device=subject.place.ours)
        count = len(generation.output_ids)
        gaps += (logprobs(model, ids, count) - logprobs(exact, ids, count)).abs().tolist()
    return fmean(gaps)


async def examine(subject: Subject, transports: Sequence[str]) -> dict[str, list[Row]]:
    async with engine_over(subject, "disk", 0) as engine:
        await asyncio.gather(*begun(subject, engine, "warm-up", TURNS, 16))
        tables = {"promises": await promises(subject, engine)}
        show(tables["promises"])
        tables["throughput"] = [await speed(subject, engine, turns) for turns in LOADS]
        show(tables["throughput"])
    tables["updates"] = []
    version = 0
    for update in transports:
        try:
            async with engine_over(subject, update, version) as engine:
                tables["updates"].append(await updates(subject, engine, update, version))
        except PaceError as error:  # which weights the servers have now is not known, so the rest can't be judged
            tables["updates"].append({"transport": update, "kept": False, "error": str(error)})
            break
        version += UPDATES
    show(tables["updates"])
    return tables
