"""The driver of `sandbox_soak.py`: plays the runs, says where it is in lines of JSON, and waits there for a line."""

import asyncio
import gc
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pace_agent.sandbox import ExecResult, Outcome, SandboxSpec, bwrap, open_provider
from pace_agent.sandbox.launcher.mounts import expose
from pace_agent.sandbox.provider import RoomProvider

TASKS = 16
WARM_UP = 320


@dataclass(frozen=True, slots=True)
class Plan:
    """What a driver does: as JSON on its command line."""

    backend: str
    runs: int
    mark: str
    room_user: int | None
    become: int | None = None
    """The driver gives up root for this user."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`{mark}` in the code is the driver's mark."""

    name: str
    code: str
    expected: Outcome
    short: bool = False
    """With a time-out of 0.05 to 0.2 s."""
    shell: bool = False
    may_fail: bool = False
    """A shell ends where it can't fork."""
    in_session: bool = False
    """Says nothing in a fresh run."""


ORDINARY = (
    Kind("print", "print(6 * 7)", Outcome.OK),
    Kind("state", "n = globals().get('n', 0) + 1; n", Outcome.OK),
    Kind("files", "for name in 'abc': open(name, 'w').write('x' * 100_000)", Outcome.OK),
    Kind("raise", "1 / 0", Outcome.NONZERO),
    Kind("shell", "echo $((6 * 7)); exit 3", Outcome.NONZERO, shell=True),
)
NASTY = (
    Kind("busy", "while True: pass", Outcome.TIMEOUT, short=True),
    Kind("child", "import subprocess; subprocess.run(['sleep', '{mark}'])", Outcome.TIMEOUT, short=True),
    Kind(
        "stubborn",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        Outcome.TIMEOUT,
        short=True,
    ),
    Kind("daemon", "import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)", Outcome.OK),
    Kind("shell daemons", "for n in 1 2 3; do (setsid sleep {mark} &) ; done", Outcome.OK, shell=True),
    Kind("bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", Outcome.TIMEOUT, short=True),
    Kind("shell bomb", "b() { b | b & }; b; sleep {mark}", Outcome.TIMEOUT, short=True, shell=True, may_fail=True),
    Kind("flood", "while True: print('flood' * 1000)", Outcome.OUTPUT_LIMIT),
    Kind("shell flood", "while :; do echo flood; done", Outcome.OUTPUT_LIMIT, shell=True),
    Kind("dead kernel", "import os; os.kill(os.getpid(), 9)", Outcome.KILLED),
    Kind("dead supervisor", "import os, time; os.kill(os.getppid(), 9); time.sleep(60)", Outcome.SANDBOX_DIED,
         in_session=True),
)  # fmt: skip
ENDLESS = ("child", "busy", "bomb", "flood", "daemon")


class Driver:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.provider = make_provider(plan)
        self.results: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.seed = 0

    async def play(self, runs: int) -> None:
        self.seed += 1
        left = iter(range(runs))
        await asyncio.gather(*(self.task(random.Random(self.seed * 1000 + n), left) for n in range(TASKS)))

    async def task(self, chance: random.Random, left: Iterator[int]) -> None:
        while True:
            session = await self.provider.open()
            for _ in range(chance.randrange(8, 25)):
                if next(left, None) is None:
                    await session.close()
                    return
                kind = chance.choice(NASTY if chance.random() < 1 / 3 else ORDINARY)
                if kind.name == "stubborn" and chance.random() < 0.7:
                    kind = NASTY[0]  # each takes a second more
                if "bomb" in kind.name if self.plan.backend == "subprocess" else kind.name == "dead supervisor":
                    kind = NASTY[0]  # nothing bounds processes there; elsewhere the supervisor can't be killed
                await self.one(session, kind, chance)
            await session.close()

    async def one(self, session: Any, kind: Kind, chance: random.Random) -> None:
        code = kind.code.replace("{mark}", self.plan.mark)
        timeout = chance.uniform(0.05, 0.2) if kind.short else 120.0
        try:
            if kind.shell:
                result: ExecResult = await session.exec(["sh", "-c", code], timeout=timeout)
            elif chance.random() < 0.3 and not kind.in_session:
                result = await self.provider.run_fresh(code, timeout=timeout)
            else:
                result = await session.run_python(code, timeout=timeout)
        except Exception as error:
            self.unexpected[f"{kind.name}: {type(error).__name__}: {error}"] += 1
            return
        self.results[kind.name] += 1
        if result.outcome is not kind.expected and not (kind.may_fail and result.outcome is Outcome.NONZERO):
            self.unexpected[f"{kind.name}: {result.outcome}: {result.stderr[-200:]}"] += 1

    async def endless(self, number: int) -> None:
        name = ENDLESS[number % len(ENDLESS)]
        kind = next(kind for kind in NASTY if kind.name == name)
        if name == "bomb" and self.plan.backend == "subprocess":
            kind = NASTY[0]
        code = kind.code.replace("{mark}", self.plan.mark)
        session = await self.provider.open()
        while True:
            if number % 4 == 3:
                await self.provider.run_fresh(code, timeout=3600)
            else:
                await session.run_python(code, timeout=3600)

    async def run(self) -> None:
        async with self.provider:
            await self.play(WARM_UP)
            # As many zygotes as there can be: they stay.
            await asyncio.gather(*(self.provider.run_fresh("1") for _ in range(2 * TASKS)))
            await self.pause("warm")
            await self.play(self.plan.runs // 5)
            await self.pause("fifth")
            await self.play(self.plan.runs - self.plan.runs // 5)
            await asyncio.gather(*(self.provider.run_fresh("1") for _ in range(2 * TASKS)))
            await self.pause("end", results=self.results, unexpected=self.unexpected)
            calls = [asyncio.ensure_future(self.endless(number)) for number in range(TASKS)]
            await asyncio.sleep(2)
            await self.pause("going", failed=[repr(call.exception()) for call in calls if call.done()])

    async def pause(self, where: str, **more: Any) -> None:
        """Until the parent has looked."""
        gc.collect()
        print(json.dumps({"at": where, **more}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def make_provider(plan: Plan) -> RoomProvider:
    spec = SandboxSpec(captured=1 << 16)
    if plan.backend == "bwrap" and plan.room_user is not None and os.geteuid() == 0:
        return RoomProvider(replace(bwrap.backend(), user=plan.room_user), spec=spec, prewarm=2)
    provider = open_provider(plan.backend, unsafe=plan.backend == "subprocess", spec=spec)
    assert isinstance(provider, RoomProvider)
    return provider


def drive(plan: Plan) -> None:
    if plan.become is not None:
        folders = [os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, Path(__file__).parents[1])]
        expose(folders, plan.become)
        os.setgroups([])
        os.setresgid(plan.become, plan.become, plan.become)
        os.setresuid(plan.become, plan.become, plan.become)
        # Anew, because a process that gave up root may not look at itself.
        again = json.dumps(asdict(replace(plan, become=None)))
        os.execve(sys.executable, [sys.executable, __file__, again], {**os.environ, "HOME": "/"})
    asyncio.run(Driver(plan).run())


if __name__ == "__main__":
    drive(Plan(**json.loads(sys.argv[1])))
