"""The programs that run apart from this package, each as one piece: for sandboxes, and for the launcher's process.

Their files import one another by their names in this package. In a bundle every file is a module that exists before
the next one asks for it, so an interpreter that sees nothing of the package, not even a file, runs them.
"""

import json
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from pace_agent.errors import SandboxError

Sources = list[tuple[str, str]]
"""Names of modules and their text, in the order in which they are made."""

COMPILE = """
def compiled(sources):
    return tuple(
        (name, compile(text, "/.pace/" + name.rpartition(".")[2] + ".py", "exec", dont_inherit=True))
        for name, text in sources
    )
"""
"""Text that defines `compiled(sources)`, what `make` wants."""
MAKE = """
def make(codes):
    import sys
    for name, code in codes:
        module = sys.modules[name] = type(sys)(name)
        exec(code, module.__dict__)
    return module
"""
"""Text that defines `make`, which brings modules to life and gives back the last one."""


def sources(package: str, order: Sequence[str]) -> Sources:
    """The named files of a package, each after those that it imports."""
    folder = Path(import_module(package).__file__ or "").parent
    return [(f"{package}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in order]


_BUILD = f"""
import importlib.util, json, marshal, sys
{COMPILE}
codes = compiled(json.load(sys.stdin.buffer))
program = compile({MAKE + "make('codes').start()"!r}, "/.pace/agent.py", "exec", dont_inherit=True)
constants = tuple(codes if constant == "codes" else constant for constant in program.co_consts)
code = program.replace(co_consts=constants)
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


@lru_cache
def compiled(package: str, order: tuple[str, ...], interpreter: str) -> bytes:
    """A .pyc of this interpreter that calls `start()` of the last file.

    Compiling anew would cost each start more than loading Python does.
    """
    command = [interpreter, "-I", "-S", "-c", _BUILD]
    given = json.dumps(sources(package, order)).encode()
    done = subprocess.run(command, input=given, capture_output=True, env={}, check=False)
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip()
        raise SandboxError(f"{interpreter} can't compile {package}: {text}")
    return done.stdout


def run_compiled(fd: int) -> str:
    """Text for `python -c` that runs a .pyc from a descriptor, and closes it."""
    return f"import marshal\nwith open({fd}, 'rb') as file: code = marshal.loads(file.read()[16:])\nexec(code)"
