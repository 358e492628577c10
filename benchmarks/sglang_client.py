"""CPU seconds per 1,000 turns of the SGLang engine with 1,000 rollouts at once, against a bare httpx loop.

    python benchmarks/sglang_client.py [--rollouts 1000] [--turns 3] [--tokens 64] [--interval 8] [--repeat 3]
                                       [--cumulative] [--episodes] [--servers 1] [--one-client]

Both play the same rollouts against the fake server of the tests, which is a process of its own: a prompt of 256 ids,
turns of `--tokens` sampled ids that end with a stop token, and 32 ids more before the next turn. All rollouts begin at
once, and a token takes 50 ms, as on a busy GPU. Every run is a fresh client process and a fresh server; what counts is
user and system time of the client process from the first request to the last result, imports and one turn to warm up
left out. Runs take turns, so that other work on the machine hits all alike; a ratio is the median of those of
neighbours.

The peer is what one writes who knows SGLang's protocol and httpx well, and wants nothing but speed: a client for each
rollout, so that it keeps its connection, with the time-outs and expiry of ours, the same body, the raw bytes of the
stream split into events, JSON parsed only where it is needed (each chunk if chunks are increments, the last one if they
repeat everything). It ends with the ids, log-probabilities and versions of each turn, which must be the same as ours.
It does not check ids, route, watch servers, wait for a pause, retry, or go on from kept tokens.

`httpx, lines` is the same with `aiter_lines()` and JSON of every chunk, as examples have it. `--one-client` adds the
peer with one client for all rollouts (and no limit of connections), as the documentation of httpx advises: its pool
looks at every connection whenever a request begins or ends. It is played once, and takes minutes.

`pause and update` is ours with a pause, new weights and a resume once the first turns have ended; below the table
stands how many turns have tokens of both versions.
`--episodes` plays ours through `Player`, the rollout loop of training, with an environment without work.
`--cumulative` has the server repeat everything in each chunk, as SGLang does unless it is told otherwise.

Last line, JSON: `cpu_vs_httpx` (ours over the peer), `peak_concurrent` (generations that the server had at once),
`cpu_seconds_per_1000_turns` and `peak_mb` (growth of the client's resident memory) of ours.
"""

import argparse
import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from pace_agent.engine.base import Engine, GenerationRequest, SamplingParams
from pace_agent.engine.sglang.engine import SGLangEngine, SGLangOptions
from pace_agent.engine.sglang.weights.kept import WeightKeeper
from pace_agent.engine.sglang.weights.transports import make_transport
from pace_agent.rollout.episode import Episode, Player
from pace_agent.rollout.limits import Limits
from pace_agent.types import Message, Task

FAKE = Path(__file__).parents[1] / "tests" / "fake_sglang.py"
VOCAB, STOP = 151_936, 7
PROMPT, OBSERVATION = 256, 32
TOKEN_SECONDS = 0.05

Turn = tuple[Sequence[int], Sequence[float], list[tuple[int, int, int]]]
"""Ids, log-probabilities, and spans (version, start, end)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one client process plays: as JSON on its command line."""

    side: str
    urls: list[str]
    rollouts: int
    turns: int
    tokens: int
    interval: int
    cumulative: bool
    model: str

    @property
    def context(self) -> int:
        return PROMPT + self.turns * (2 * self.tokens + OBSERVATION)

    @property
    def budget(self) -> int:
        return 2 * self.tokens


def new_ids(rollout: int, turn: int) -> list[int]:
    """What the environment says before a turn."""
    chance = random.Random(rollout * 1_000 + turn)
    return [chance.randrange(100, VOCAB) for _ in range(OBSERVATION if turn else PROMPT)]


# ---- both sides ------------------------------------------------------------------------------------------------------


async def play(load: Load, rollout: int, generate: Callable[[int, int, list[int]], Awaitable[Turn]]) -> list[Turn]:
    """One rollout, turn after turn."""
    ids: list[int] = []
    turns = []
    for turn in range(load.turns):
        ids += new_ids(rollout, turn)
        turns.append(await generate(rollout, turn, ids))
        ids += turns[-1][0]
    return turns


def seed_of(rollout: int, turn: int) -> int:
    return rollout * 1009 + turn


# ---- ours ------------------------------------------------------------------------------------------------------------


def make_engine(load: Load) -> SGLangEngine:
    model = Path(load.model)
    return SGLangEngine(
        load.urls,
        options=SGLangOptions(vocab_size=VOCAB, context_length=load.context, stream_interval=load.interval),
        transport=make_transport("disk"),
        keeper=WeightKeeper(model),
        model=model,
    )


def by_engine(load: Load, engine: Engine) -> Callable[[int], Awaitable[list[Turn]]]:
    async def generate(rollout: int, turn: int, ids: list[int]) -> Turn:
        sampling = SamplingParams(load.budget, stop_token_ids=(STOP,), seed=seed_of(rollout, turn))
        request = GenerationRequest(f"{rollout}-{turn}", ids, sampling, session=str(rollout))
        generation = await engine.generate(request)
        spans = [(span.version, span.start, span.end) for span in generation.spans]
        return generation.output_ids, generation.logprobs, spans

    async def rollout(number: int) -> list[Turn]:
        turns = await play(load, number, generate)
        await engine.release(str(number))
        return turns

    return rollout


class NumberChat:
    """Messages name a rollout and a turn; the ids are those of `new_ids`."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        rollout, turn = map(int, messages[-1].content.split())
        return new_ids(rollout, turn)

    def suffix_ids(self, messages: Sequence[Message], *, last_output: Sequence[int]) -> list[int]:
        return self.prompt_ids(messages)

    def decode(self, output_ids: Sequence[int]) -> str:
        return ""


class NoOp:
    """The environment without work: the number of the task and of the turn is all it says."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._turn = 0
        self._rollout = ""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        assert options is not None
        self._rollout = options["task"].prompt
        return (Message("user", f"{self._rollout} 0"),), {}

    async def astep(self, action: Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self._turn += 1
        if self._turn == self._turns:
            return (), 1.0, True, False, {}
        return (Message("user", f"{self._rollout} {self._turn}"),), 0.0, False, False, {}

    async def aclose(self) -> None: ...


def by_episodes(load: Load, engine: Engine) -> Callable[[int], Awaitable[list[Turn]]]:
    player = Player(
        env_id="bench/NoOp-v0",
        make_env=lambda: NoOp(load.turns),
        engine=engine,
        chat=NumberChat(),
        parse=lambda text: Message("assistant", text),
        limits=Limits(turns=load.turns, turn_tokens=load.budget, context=load.context),
    )

    async def rollout(number: int) -> list[Turn]:
        task = Task(str(number), str(number))
        trajectory = await player.play(Episode(id=number, group_id=0, task=task, sampling_seed=number))
        if trajectory.error is not None:
            raise SystemExit(f"a rollout ended as {trajectory.stop}: {trajectory.error}")
        return [
            (turn.output_ids, turn.logprobs, [(span.version, span.start, span.end) for span in turn.spans])
            for turn in trajectory.turns
        ]

    return rollout


async def update_midway(load: Load, engine: SGLangEngine) -> None:
    """A pause, new weights and a resume when all have ended their first turn and are in the next."""
    async with asyncio.timeout(600):
        while engine.stats().sampled_tokens < load.rollouts * load.tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await asyncio.sleep(load.tokens * TOKEN_SECONDS / 2)
    await engine.pause()
    await engine.update_weights(Path(load.model), 1)
    await engine.resume()


# ---- the peer --------------------------------------------------------------------------------------------------------


def by_httpx(load: Load) -> Callable[[int], Awaitable[list[Turn]]]:
    read = read_lines if "lines" in load.side else read_last if load.cumulative else read_each
    tls = httpx.create_ssl_context(verify=False)

    def make_client(url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=url,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            timeout=httpx.Timeout(None, connect=10.0),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            verify=tls,
        )

    async def generate(client: httpx.AsyncClient, rollout: int, turn: int, ids: list[int]) -> Turn:
        body = {
            "rid": f"{rollout}-{turn}",
            "input_ids": ids,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "max_new_tokens": load.budget,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "stream_interval": load.interval,
                "skip_special_tokens": False,
                "stop_token_ids": [STOP],
                "sampling_seed": seed_of(rollout, turn) * 1_000_003,
            },
        }
        async with client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            return await read(response, load.cumulative)

    async def alone(number: int) -> list[Turn]:
        async with make_client(load.urls[number % len(load.urls)]) as client:
            return await play(load, number, partial(generate, client))

    shared = [make_client(url) for url in load.urls]

    async def together(number: int) -> list[Turn]:
        return await play(load, number, partial(generate, shared[number % len(shared)]))

    return together if "one client" in load.side else alone


async def read_each(response: httpx.Response, cumulative: bool) -> Turn:
    ids: list[int] = []
    logprobs: list[float] = []
    meta: dict[str, Any] = {}
    rest = b""
    async for data in response.aiter_raw():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                chunk = json.loads(event[6:])
                meta = chunk["meta_info"]
                ids += chunk["output_ids"]
                logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
    return ids, logprobs, spans_in(meta)


async def read_last(response: httpx.Response, cumulative: bool) -> Turn:
    last = rest = b""
    async for data in response.aiter_raw():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                last = event
    chunk = json.loads(last[6:])
    meta = chunk["meta_info"]
    return chunk["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], spans_in(meta)


async def read_lines(response: httpx.Response, cumulative: bool) -> Turn:
    ids: list[int] = []
    logprobs: list[float] = []
    meta: dict[str, Any] = {}
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line[6:])
            meta = chunk["meta_info"]
            if cumulative:
                ids, logprobs = [], []
            ids += chunk["output_ids"]
            logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
    return ids, logprobs, spans_in(meta)


def spans_in(meta: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    return [(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]


# ---- a client process ------------------------------------------------------------------------------------------------


async def client(load: Load) -> dict[str, Any]:
    """Play it all, and say what it cost."""
    if load.side.startswith("httpx"):
        return await measure(load, by_httpx(load))
    if "update" in load.side:
        import torch  # noqa: F401  # an update needs it, and imports don't count
    engine = make_engine(load)
    await engine.start()
    rollout = (by_episodes if "episodes" in load.side else by_engine)(load, engine)
    figures = await measure(load, rollout, update_midway(load, engine) if "update" in load.side else None)
    await engine.aclose()
    return {**figures, "interrupted": engine.stats().interrupted, "paused": engine.stats().paused_seconds}


async def measure(
    load: Load, rollout: Callable[[int], Awaitable[list[Turn]]], beside: Awaitable[None] | None = None
) -> dict[str, Any]:
    await rollout(load.rollouts)  # one more, to warm up
    memory, wall, cpu = memory_mb("VmRSS"), time.monotonic(), time.process_time()
    work = [rollout(number) for number in range(load.rollouts)]
    played, _ = await asyncio.gather(asyncio.gather(*work), beside or asyncio.sleep(0))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {"cpu": cpu, "wall": wall, "mb": memory_mb("VmHWM") - memory, **digests(load, played)}


def memory_mb(name: str) -> float:
    """VmRSS: resident memory now, VmHWM: the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def digests(load: Load, played: Sequence[Sequence[Turn]]) -> dict[str, str]:
    """Of the ids, and of log-probabilities with versions. Every turn must be whole."""
    ids, stamps = hashlib.sha256(), hashlib.sha256()
    for turns in played:
        for output_ids, logprobs, spans in turns:
            if not len(output_ids) == len(logprobs) == spans[-1][2] == load.tokens or len(turns) != load.turns:
                raise SystemExit(f"{load.side}: a turn of {len(output_ids)} ids with {spans}")
            ids.update(json.dumps(list(output_ids)).encode())
            stamps.update(json.dumps([list(logprobs), spans]).encode())
    return {"ids": ids.hexdigest(), "stamps": stamps.hexdigest()}


# ---- the table -------------------------------------------------------------------------------------------------------


@contextmanager
def servers(options: argparse.Namespace, context: int) -> Iterator[list[str]]:
    """URLs of fresh fake servers."""
    flags = {
        "--vocab-size": VOCAB,
        "--context-length": context + 8,
        "--token-seconds": TOKEN_SECONDS,
        "--stop-after": options.tokens,
    }
    command = [sys.executable, str(FAKE), *(str(part) for flag in flags.items() for part in flag)]
    if not options.cumulative:
        command.append("--incremental")
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(options.servers)]
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run(side: str, options: argparse.Namespace, model: str) -> dict[str, Any]:
    """One client process against fresh servers: its figures, and what the servers saw."""
    load = Load(side, [], options.rollouts, options.turns, options.tokens, options.interval, options.cumulative, model)
    with servers(options, load.context) as urls:
        load.urls.extend(urls)
        command = [sys.executable, __file__, "--client", json.dumps(asdict(load))]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        seen = [httpx.get(f"{url}/fake/state", trust_env=False, timeout=60.0).json() for url in urls]
    figures: dict[str, Any] = json.loads(answer)
    asked = sum(state["requests"] for state in seen) - options.turns
    figures["concurrent"] = sum(state["peak_streams"] for state in seen)
    figures["connections"] = sum(state["peak_connections"] for state in seen)
    figures["per_thousand"] = figures["cpu"] * 1000 / (options.rollouts * options.turns)
    if "update" not in side and asked != options.rollouts * options.turns:
        raise SystemExit(f"{side}: {asked} requests for {options.rollouts * options.turns} turns")
    return figures


def make_model(folder: Path) -> None:
    """Weights to update with: the fake does not read them."""
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(8, 8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')


def check_same(results: Mapping[str, list[dict[str, Any]]]) -> None:
    for side, runs in results.items():
        for one in runs:
            first = results["httpx"][0]
            if one["ids"] != first["ids"] or ("update" not in side and one["stamps"] != first["stamps"]):
                raise SystemExit(f"{side} ended with other turns than the peer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--interval", type=int, default=8, help="tokens per chunk")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--cumulative", action="store_true", help="the server repeats everything in each chunk")
    parser.add_argument("--episodes", action="store_true", help="play ours through the rollout loop")
    parser.add_argument(
        "--one-client", action="store_true", help="also the peer with one client for all; takes minutes"
    )
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        print(json.dumps(asyncio.run(client(Load(**json.loads(options.client))))))
        return
    ours = "episodes" if options.episodes else "engine"
    sides = [ours, "httpx", f"{ours}, pause and update", "httpx, lines"]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        for _ in range(options.repeat):
            for side in sides:
                results[side].append(run(side, options, model))
        if options.one_client:
            results["httpx, one client"] = [run("httpx, one client", options, model)]
    check_same(results)
    show(options, results)
    own = results[ours]
    figures = {
        "cpu_vs_httpx": round(ratio(own, results["httpx"]), 3),
        "peak_concurrent": min(one["concurrent"] for one in own),
        "cpu_seconds_per_1000_turns": round(median(one["per_thousand"] for one in own), 3),
        "peak_mb": round(median(one["mb"] for one in own), 1),
    }
    print(json.dumps(figures))


def ratio(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> float:
    return median(one["cpu"] / other["cpu"] for one, other in zip(ours, theirs, strict=False))


def show(options: argparse.Namespace, results: Mapping[str, list[dict[str, Any]]]) -> None:
    print(f"{options.rollouts} rollouts at once, {options.turns} turns of {options.tokens} tokens each\n")
    print(f"{'':<28} {'peak generations':>16} {'connections':>12} {'CPU s/1,000':>12} {'over httpx':>11} {'MB':>7}")
    for side, runs in results.items():
        print(
            f"{side:<28} {min(one['concurrent'] for one in runs):>16} {max(one['connections'] for one in runs):>12}"
            f" {median(one['per_thousand'] for one in runs):>12.3f} {ratio(runs, results['httpx']):>11.3f}"
            f" {median(one['mb'] for one in runs):>7.1f}"
        )
    for side, runs in results.items():
        if "update" in side:
            share = median(one["interrupted"] for one in runs) / (options.rollouts * options.turns)
            paused = median(one["paused"] for one in runs)
            print(f"\n{side}: {share:.0%} of the turns have two versions, {paused:.2f} s paused")


if __name__ == "__main__":
    main()
