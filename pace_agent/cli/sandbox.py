"""`pace-agent sandbox check` and `sandbox run`."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pace_agent.cli.wiring import open_sandbox
from pace_agent.config.models import SandboxSection
from pace_agent.errors import SandboxError, UserError
from pace_agent.sandbox import BackendCheck, backend_named, check, check_one
from pace_agent.sandbox.base import ExecResult, Outcome
from pace_agent.sandbox.probes import ProbeResult, run
from pace_agent.sandbox.provider import RoomProvider

STATUS = {Outcome.TIMEOUT: 124, Outcome.OOM: 137, Outcome.OUTPUT_LIMIT: 141}
"""Exit status for what ended without one of its own, as shells and `timeout` have it."""
NO_SANDBOX = 125
MOST_STDIN = 64 << 20

Tried = dict[str, list[ProbeResult]]
"""By kind of room: the backend's sessions, and its fresh executions where those are made in another way."""


def check_backends(section: SandboxSection, *, quick: bool, everything: bool, as_json: bool) -> int:
    """Print what works here and what each contains; status 1 if no isolating backend works, or one leaks."""
    console = Console(highlight=False)
    image, runtime = section.image, section.runtime
    found = check(image, runtime) if section.backend == "auto" else [check_one(section.backend, image, runtime)]
    tried: Tried = {}
    for each in found:
        if each.available and not quick and each.backend != "subprocess":
            with Console(stderr=True).status(f"attacking {each.backend} from inside"):
                tried |= asyncio.run(_attack(each.backend, section))
    if as_json:
        print(json.dumps({"backends": [asdict(each) for each in found], "probes": _probe_facts(tried)}))
    else:
        _print_backends(console, found)
        for kind, results in tried.items():
            _print_probes(console, kind, results, everything)
    leaks = any(not result.contained for results in tried.values() for result in results)
    works = any(each.available for each in found if each.backend != "subprocess")
    return int(leaks or not works)


async def _attack(name: str, section: SandboxSection) -> Tried:
    backend = backend_named(name, section.image, section.runtime)
    async with RoomProvider(backend) as provider:
        tried = {f"{name} session": await run(provider, user=backend.user)}
        tried[f"{name} fresh"] = await run(provider, fresh=True, has_zygote=backend.has_zygote, user=backend.user)
    return tried


def _print_backends(console: Console, found: list[BackendCheck]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("backend", "works here", "what to know"):
        table.add_column(title, overflow="fold")
    for each in found:
        works = Text("yes", style="green") if each.available else Text("no", style="red")
        if each.backend == "subprocess":
            works = Text("unsafe", style="yellow")
        said = ". ".join(part for part in (each.reason, each.remedy) if part)
        table.add_row(Text(each.backend, style="bold"), works, Text(said))
    console.print(table)


def _print_probes(console: Console, kind: str, results: list[ProbeResult], everything: bool) -> None:
    held = sum(result.contained for result in results)
    style = "green" if held == len(results) else "red"
    console.print(f"\n[bold]{kind}[/]: [{style}]{held} of {len(results)} attacks contained[/]")
    shown = [result for result in results if everything or not result.contained]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("attack", "contained", "by", "how it ended"):
        table.add_column(title, overflow="fold")
    for result in shown:
        mark = Text("yes", style="green") if result.contained else Text("NO", style="bold red")
        by = result.probe.contained_by(kind.split()[0]) if result.contained else ""
        table.add_row(Text(result.probe.name), mark, Text(by), Text(result.detail))
    console.print(table)


def _probe_facts(tried: Tried) -> dict[str, list[dict[str, Any]]]:
    return {
        kind: [
            {
                "attack": result.probe.name,
                "group": str(result.probe.group),
                "contained": result.contained,
                "by": result.probe.contained_by(kind.split()[0]),
                "detail": result.detail,
            }
            for result in results
        ]
        for kind, results in tried.items()
    }


def run_file(path: str, section: SandboxSection, *, as_json: bool) -> int:
    """Run a file of Python in a sandbox of its own, with our standard input; the exit status."""
    code, stdin = _read(path)
    try:
        result = asyncio.run(_run(code, stdin, section))
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_SANDBOX
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _write(sys.stdout, result.stdout)
        _write(sys.stderr, result.stderr)
        if result.outcome not in (Outcome.OK, Outcome.NONZERO):
            print(f"pace-agent: {result.outcome} after {result.seconds:.1f} s", file=sys.stderr)
    if result.outcome is Outcome.NONZERO:
        return (result.exit_code or 1) & 0xFF or 1
    if result.outcome is Outcome.KILLED:
        return 128 - (result.exit_code or 0)
    return STATUS.get(result.outcome, 0 if result.outcome is Outcome.OK else NO_SANDBOX)


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _read(path: str) -> tuple[str, bytes]:
    """The program, and the standard input for it."""
    given = b"" if sys.stdin is None or (sys.stdin.isatty() and path != "-") else sys.stdin.buffer.read(MOST_STDIN + 1)
    if len(given) > MOST_STDIN:
        raise UserError(
            f"standard input is longer than {MOST_STDIN >> 20} MiB; it is read whole before the program starts"
        )
    try:
        if path == "-":
            return given.decode("utf-8"), b""
        return Path(path).read_text(encoding="utf-8"), given
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from None


async def _run(code: str, stdin: bytes, section: SandboxSection) -> ExecResult:
    async with open_sandbox(section.model_copy(update={"prewarm": 0})) as provider:
        return await provider.run_fresh(code, stdin=stdin)
