"""One attack, and the ways to tell whether it failed: by what it says, and by what the host sees."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import ExecResult, Outcome, Provider, SandboxSpec, Session
from pace_agent.sandbox.probes import attacks
from pace_agent.sandbox.probes.world import World

SPEC = SandboxSpec(
    timeout=10.0, memory=128 << 20, processes=24, descriptors=64, disk=1 << 20, files=256, captured=1 << 16
)
"""Small limits, so that reaching them is quick."""


class Group(StrEnum):
    FILES = "files"
    NETWORK = "network"
    IDENTITY = "identity"
    CALLS = "system calls"
    EXHAUSTION = "exhaustion"
    ENDS = "ends"


@dataclass(slots=True)
class Trial:
    """One probe being made: where, and with what."""

    probe: "Probe"
    provider: Provider
    world: World
    fresh: bool
    session: Session | None
    given: dict[str, object] = field(default_factory=dict)

    async def run(self, code: str | None = None, timeout: float | None = None) -> ExecResult:
        given = {**self.world.given, **self.given}
        text = f"{attacks.PRELUDE}given = {given!r}\n{self.probe.code if code is None else code}"
        if self.session is not None:
            return await self.session.run_python(text, timeout=timeout)
        return await self.provider.run_fresh(text, timeout=timeout, spec=SPEC)

    async def recovers(self) -> bool:
        """Whether the room, or the next one, serves as if nothing had been."""
        if self.session is not None:
            await self.session.reset()
        result = await self.run("print(6 * 7)")
        return result.outcome is Outcome.OK and result.stdout == "42\n"


Verdict = tuple[bool, str]
"""Whether it was contained, and how that showed."""
Judge = Callable[[Trial], Awaitable[Verdict]]


def word_of(result: ExecResult) -> str:
    """The last word that was printed; what happened instead, where the code could not finish."""
    words = result.stdout.split()
    if result.outcome is Outcome.OK and words:
        return words[-1]
    return f"{result.outcome}: {(result.stderr.strip().splitlines() or ['no answer'])[-1]}"


async def by_word(trial: Trial) -> Verdict:
    word = word_of(await trial.run())
    return word in trial.probe.refusals, word


async def by_victim(trial: Trial) -> Verdict:
    """A process of the host, started to be killed, must live."""
    word = word_of(await trial.run())
    for _ in range(20):  # who was killed may need a moment to die
        if not trial.world.victim_lives():
            return False, "killed"
        if word != "allowed":
            break
        await asyncio.sleep(0.05)
    return True, word


async def by_target(trial: Trial) -> Verdict:
    """A file of the host that everyone may write must be as it was."""
    word = word_of(await trial.run())
    return word in trial.probe.refusals and trial.world.untouched(), word


async def by_listener(trial: Trial) -> Verdict:
    """A listener of the host must hear nobody."""
    word = word_of(await trial.run())
    return word in trial.probe.refusals and not trial.world.was_called(), word


async def by_recovery(trial: Trial) -> Verdict:
    """Bounded, or ended, and the room goes on. `refusals` name words and outcomes."""
    result = await trial.run()
    word = word_of(result)
    known = word in trial.probe.refusals or result.outcome in trial.probe.refusals
    if not known:
        return False, word
    word = word if result.outcome is Outcome.OK else str(result.outcome)
    return (True, word) if await trial.recovers() else (False, f"{word}, and the room did not recover")


async def by_deadline(trial: Trial) -> Verdict:
    result = await trial.run(timeout=0.3)
    if result.outcome is not Outcome.TIMEOUT:
        return False, word_of(result)
    return await trial.recovers(), str(result.outcome)


async def by_result(trial: Trial) -> Verdict:
    """Whatever it does to its own room, there must be a result and not an error of ours."""
    try:
        result = await trial.run()
        recovered = await trial.recovers()
    except SandboxError as error:
        return False, f"passed off as our failure: {error}"
    return recovered, str(result.outcome)


async def by_absence(trial: Trial) -> Verdict:
    """What left its parents must be seen to live, and be gone with the room or the execution."""
    mark = trial.world.new_mark()
    trial.given = {"mark": mark, "stay": 1.0 if trial.fresh else 0.0}
    running = asyncio.ensure_future(trial.run())
    seen = False
    while not seen and (not running.done() or trial.session is not None):
        await asyncio.sleep(0.01)
        if running.done() and running.result().outcome is not Outcome.OK:
            break
        seen = bool(trial.world.processes(mark))
    await running
    if trial.session is not None:
        await trial.session.close()
    left = trial.world.processes(mark)
    trial.world.kill(left)
    if not seen:
        return False, "it was never seen to run, so its end shows nothing"
    return not left, f"{len(left)} left" if left else "gone"


async def by_reading(trial: Trial) -> Verdict:
    """While a folder turns into a link to the host's and back, nothing may be read or written through it."""
    assert trial.session is not None
    seconds = 0.4
    trial.given = {"seconds": seconds}
    if (word := word_of(await trial.run())) != "started":
        return False, word
    end, read, written = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        try:
            if (await trial.session.get("swapped/secret")).decode() == trial.world.token:
                return False, "read through a link"
            read += 1
        except OSError:
            pass
        try:
            await trial.session.put("swapped/target", b"x")
            written += 1
        except OSError:
            pass
    return trial.world.untouched(), f"{written} writes went into the room's own folder"


async def by_path(trial: Trial) -> Verdict:
    """No name leads out of /box, with the file of the host at its end or not."""
    assert trial.session is not None
    secret = str(trial.world.secret)
    for path in (
        secret,
        "../" * 20 + secret.lstrip("/"),
        f"/box/../{secret}",
        f"a/../..{secret}",
        f"/boxes/..{secret}",
    ):
        for name in (path, path.replace("secret", "target")):
            try:
                await trial.session.put(name, b"x")
                return False, f"{name} was written"
            except OSError:
                pass
            try:
                await trial.session.get(name)
                return False, f"{name} was read"
            except OSError:
                pass
    return trial.world.untouched(), "EACCES"


async def by_next(trial: Trial) -> Verdict:
    """The next execution must find nothing of this one."""
    if (word := word_of(await trial.run())) != "left":
        return False, word
    word = word_of(await trial.run(attacks.FIND))
    return word in trial.probe.refusals, word


@dataclass(frozen=True, slots=True)
class Probe:
    name: str
    group: Group
    code: str
    """See `attacks`."""
    by: str
    """What contains it."""
    refusals: tuple[str, ...] = ()
    """Answers that mean that it failed."""
    judge: Judge = by_word
    docker: str = ""
    """What contains it in Docker, where that is another thing."""
    sessions: bool = True
    fresh: bool = True
    """Whether it can be made in a session, and in a fresh execution."""
    shared: bool = True
    """Whether the session is as before, and serves for the next probe."""

    def contained_by(self, backend: str) -> str:
        return self.docker if self.docker and backend == "docker" else self.by
