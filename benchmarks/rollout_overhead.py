"""CPU seconds per 1,000 turns of the rollout loop, against the same episodes in verifiers and around a skyrl-gym env.

    python -m venv peers && peers/bin/pip install verifiers skyrl-gym
    python benchmarks/rollout_overhead.py --peers peers [--classic OTHER] [--rollouts 200] [--turns 5] [--repeats 9]

The peers live in an environment of their own, since their pins and ours may clash; `rollout_peers.py` runs there.
`--classic` names a second one with verifiers 0.1 (`pip install "verifiers<0.2"`), the last with `MultiTurnEnv`.

An episode: a question, then turns of 60 characters that an environment without work answers with 20 characters. The
model is a script. All rollouts of a repeat run at once in one event loop. Ours are played by `Player`, with the
`ScriptedEngine` that tests use, a chat format, limits, typed ends and stamps; a trajectory is what comes out. Repeats
of ours and of each peer take turns, so that other work on the machine hits both alike; a ratio is the median of theirs.

- verifiers: its own rollout, with a client that has the response ready. Ours takes one id per byte.
- skyrl-gym: it has environments and no rollout, so a bare loop around one, without engine, limits or error handling.
  `text` only appends to a conversation; nothing can be trained on that. `bytes` also keeps ids, loss mask and
  log-probabilities, one id per byte. `template` takes the ids from the chat template and tokenizer of the model that
  the shop environment ships, as training on sampled tokens must; the ids are checked to be the same as ours.

Last line, JSON, ours over theirs: `vs_verifiers` (the cheapest of the versions given), `vs_skyrl_gym` (`template`: both
end with the same record of the same episode), `vs_skyrl_gym_text` and `vs_skyrl_gym_bytes` (the bare loop does less).
`--env` also shows what it costs to make an environment with tools and reset it.
"""

import argparse
import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from rollout_peers import ANSWER, QUESTION, SAID

import pace_agent.envs.shop as shop
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.rollout.episode import Chat, Episode, Player
from pace_agent.rollout.limits import Limits
from pace_agent.types import Message, StopReason, Task, Trajectory

TOKENIZER = Path(shop.__file__).parent / "warm_start"
END = 0


class ByteChat:
    """One id per byte, a message is its role and its text, a turn ends with 0: as cheap as a format can be."""

    stop_token_ids = (END,)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return list("".join(f"{message.role}:{message.content}\n" for message in messages).encode())

    def suffix_ids(self, messages: Sequence[Message], *, last_output: Sequence[int]) -> list[int]:
        return self.prompt_ids(messages)

    def decode(self, output_ids: Sequence[int]) -> str:
        return bytes(output_ids[:-1]).decode()


class NoOp:
    """The environment without work: answers every turn but the last."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return (Message("user", QUESTION),), {}

    async def astep(self, action: Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        if self.left == 0:
            return (), 1.0, True, False, {}
        return (Message("user", ANSWER),), 0.0, False, False, {}

    async def aclose(self) -> None: ...


def make_player(chat: Chat, sampled: Sequence[int], turns: int) -> Player:
    ids = tuple(sampled)
    return Player(
        env_id="bench/NoOp-v0",
        make_env=lambda: NoOp(turns),
        engine=ScriptedEngine(lambda request: ids),
        chat=chat,
        parse=lambda text: Message("assistant", text),
        limits=Limits(turns=turns, turn_tokens=256, context=8192),
    )


def template_player(turns: int) -> Player:
    from pace_agent.chat import ChatFormat

    chat = ChatFormat.from_pretrained(TOKENIZER)
    said = chat.tokenizer.encode(SAID, add_special_tokens=False)
    return make_player(chat, [*said, chat.stop_token_ids[0]], turns)


async def ours(player: Player, rollouts: int) -> tuple[float, list[Trajectory]]:
    """CPU seconds of all rollouts at once, and their trajectories."""
    task = Task("t", QUESTION)
    started = time.process_time()
    ended = await asyncio.gather(*(player.play(Episode(id=i, group_id=i // 8, task=task)) for i in range(rollouts)))
    return time.process_time() - started, ended


class Peers:
    """`rollout_peers.py` in another environment, kept running so that its imports are paid once."""

    def __init__(self, venv: Path) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{venv} is no virtual environment; {Path(__file__).name} says at its top how to make it")
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        environment = {**os.environ, **quiet, "TOKENIZER": str(TOKENIZER)}
        environment.pop("PYTHONPATH", None)  # ours, and none of the peers' business
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("rollout_peers.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def play(self, name: str, rollouts: int, turns: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {rollouts} {turns}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"cpu"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{name} ended without an answer; what it said stands above")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Row:
    """CPU seconds per 1,000 turns, and ours over theirs: medians over repeats that took turns."""

    name: str
    ours: float
    theirs: float
    ratio: float


def compare(name: str, peers: Peers, player: Player, *, rollouts: int, turns: int, repeats: int) -> Row:
    """Both once to warm up and to check that they play the same episodes, then in turns."""
    (_, ended), answer = asyncio.run(ours(player, rollouts)), peers.play(name, rollouts, turns)
    check_same(ended, answer["kept"], turns)
    mine, other = [], []
    for _ in range(repeats):
        mine.append(asyncio.run(ours(player, rollouts))[0])
        other.append(peers.play(name, rollouts, turns)["cpu"])
    label = name.replace(" ", f" {answer['version']} ", 1) if " " in name else f"{name} {answer['version']}"
    per_thousand = 1000 / (rollouts * turns)
    ratio = median(one / another for one, another in zip(mine, other, strict=True))
    return Row(label, median(mine) * per_thousand, median(other) * per_thousand, ratio)


def check_same(ended: Sequence[Trajectory], kept: list[Any], turns: int) -> None:
    """The peer kept ids, or the texts of the turns: the same as ours."""
    for trajectory in ended:
        if trajectory.stop is not StopReason.TERMINATED or len(trajectory.turns) != turns:
            raise SystemExit(f"ours ended as {trajectory.stop} after {len(trajectory.turns)} turns: {trajectory.error}")
    texts = [message.content for message in ended[0].messages if message.role == "assistant"]
    expected: list[Any] = ended[0].ids() if isinstance(kept[0], int) else texts
    if kept != expected:
        raise SystemExit(f"the episodes differ: ours {expected}, theirs {kept}")


def environment_cost(count: int = 200) -> None:
    """Microseconds of a CPU to make an environment with three tools, and to make and reset it."""
    from pace_agent.registry import make

    async def reset() -> None:
        env: Any = make("pace/Shop-v0").unwrapped
        await env.areset(seed=0)
        await env.aclose()

    async def only_make() -> None:
        make("pace/Shop-v0")

    def measure(work: Callable[[], Awaitable[None]]) -> float:
        async def repeat() -> float:
            started = time.process_time()
            for _ in range(count):
                await work()
            return (time.process_time() - started) / count * 1e6

        return median(asyncio.run(repeat()) for _ in range(5))

    print(f"\npace/Shop-v0: made in {measure(only_make):.0f} us, made and reset in {measure(reset):.0f} us of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="virtual environment with verifiers and skyrl-gym")
    parser.add_argument("--classic", type=Path, help="virtual environment with verifiers 0.1")
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--env", action="store_true", help="also measure an environment with tools")
    options = parser.parse_args()
    size = {"rollouts": options.rollouts, "turns": options.turns, "repeats": options.repeats}
    cheap = make_player(ByteChat(), [*SAID.encode(), END], options.turns)
    print(f"{options.rollouts} rollouts at once, {options.turns} turns each; CPU seconds per 1,000 turns\n")
    print(f"{'':<28} {'ours':>8} {'theirs':>8} {'ratio':>7}")

    def show(row: Row) -> float:
        print(f"{row.name:<28} {row.ours:>8.4f} {row.theirs:>8.4f} {row.ratio:>7.3f}", flush=True)
        return row.ratio

    with Peers(options.peers) as peers:
        verifiers = [show(compare("verifiers", peers, cheap, **size))]
        text = show(compare("skyrl-gym text", peers, cheap, **size))
        plain = show(compare("skyrl-gym bytes", peers, cheap, **size))
        template = show(compare("skyrl-gym template", peers, template_player(options.turns), **size))
    if options.classic is not None:
        with Peers(options.classic) as classic:
            verifiers.append(show(compare("verifiers", classic, cheap, **size)))
    if options.env:
        environment_cost()
    figures = {
        "vs_verifiers": max(verifiers),
        "vs_skyrl_gym": template,
        "vs_skyrl_gym_bytes": plain,
        "vs_skyrl_gym_text": text,
    }
    print(json.dumps({name: round(ratio, 3) for name, ratio in figures.items()}))


if __name__ == "__main__":
    main()
