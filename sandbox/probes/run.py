"""Making every probe of the table, in sessions or in fresh executions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pace_agent.sandbox.base import Provider
from pace_agent.sandbox.probes.judging import SPEC, Group, Probe, Trial
from pace_agent.sandbox.probes.table import PROBES, SEES_PROCESSES
from pace_agent.sandbox.probes.world import World

AT_ONCE = 4
"""Probes that go on at a time, each in a session of its own."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    probe: Probe
    contained: bool
    detail: str
    """How the attack ended: mostly the name of an error."""


async def run(
    provider: Provider, *, fresh: bool = False, has_zygote: bool = True, user: int | None = None
) -> list[ProbeResult]:
    """Make every probe in sessions of a started provider, or in its fresh executions; in the order of the table.

    `has_zygote`: fresh executions are not sessions of their own. `user` is whom the rooms run as, seen from outside,
    where that is another one than we: what the attacks aim at belongs to this user then. SandboxError if there is no
    room to be had.
    """
    chosen = [probe for probe in PROBES if (probe.fresh if fresh else probe.sessions)]
    if fresh and not has_zygote:  # each is a session: what sessions can't show is left to try
        chosen = [probe for probe in chosen if not probe.sessions or probe.name == SEES_PROCESSES]
    results: dict[str, ProbeResult] = {}
    with World(user) as world:
        world.given |= {
            "processes": SPEC.processes,
            "memory": SPEC.memory,
            "disk": SPEC.disk,
            "files": SPEC.files,
            "descriptors": SPEC.descriptors,
            "captured": SPEC.captured,
        }
        await _in_turn(provider, world, fresh, [probe for probe in chosen if probe.shared], results)
        alone = [probe for probe in chosen if not probe.shared]
        if not results[SEES_PROCESSES].contained:
            open_ended = [probe for probe in alone if probe.group is Group.EXHAUSTION]
            results |= {probe.name: ProbeResult(probe, False, "not tried: no room here") for probe in open_ended}
            alone = [probe for probe in alone if probe.group is not Group.EXHAUSTION]
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(probe: Probe) -> None:
            async with slots:
                await _in_turn(provider, world, fresh, [probe], results)

        await asyncio.gather(*map(one, alone))
    return [results[probe.name] for probe in chosen]


async def _in_turn(
    provider: Provider, world: World, fresh: bool, probes: Sequence[Probe], results: dict[str, ProbeResult]
) -> None:
    """In one session, or each in a fresh execution."""
    session = None if fresh else await provider.open(SPEC)
    try:
        for probe in probes:
            world.restore()
            contained, detail = await probe.judge(Trial(probe, provider, world, fresh, session))
            results[probe.name] = ProbeResult(probe, contained, detail)
    finally:
        if session is not None:
            await session.close()
