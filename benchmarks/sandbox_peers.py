"""`print(1)` in the sandboxes and tools of other packages. `sandbox.py` starts this program with the peers' own Python.

The argument is JSON: `python` is the interpreter to run, `bwrap` the bubblewrap binary, `image` a Docker image or null.
It reads lines: `names` is answered with every peer and why it can't run here, or nothing; the name of a peer with what
one more run printed. Sessions are opened once, before that. Nothing of pace-agent is imported here.
"""

# The peers are not installed where types are checked.
# mypy: ignore-errors

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

CODE = "print(1)"
Run = Callable[[], str]


def folder_of_python(target: str) -> str:
    """A folder with a link of the name `python`."""
    folder = tempfile.mkdtemp(prefix="pace-benchmark-")
    ENDS.append(lambda: shutil.rmtree(folder))
    os.chmod(folder, 0o755)
    os.symlink(target, f"{folder}/python")
    return folder


def skyrl_gym(setup: dict[str, Any]) -> Run:
    """Its tool runs whatever `python` comes first in PATH."""
    from skyrl_gym.tools.python import PythonCodeExecutorToolGroup

    os.environ["PATH"] = f"{folder_of_python(setup['python'])}:{os.environ.get('PATH', os.defpath)}"
    return lambda: PythonCodeExecutorToolGroup().python(CODE)


def verifiers(setup: dict[str, Any]) -> Run:
    """0.4 has no tool for Python: what it runs programs with, in a process."""
    from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

    runtime = SubprocessRuntime(SubprocessConfig())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(runtime.start())
    ENDS.append(lambda: loop.run_until_complete(runtime.stop()))
    return lambda: loop.run_until_complete(runtime.run([setup["python"], "-c", CODE], {})).stdout


def llm_sandbox(setup: dict[str, Any], **options: Any) -> Run:
    from llm_sandbox import SandboxSession

    session = SandboxSession(lang="python", verbose=False, skip_environment_setup=True, **options)
    ENDS.append(session.close)
    session.open()

    def run() -> str:
        done = session.run(CODE)
        if done.exit_code != 0:
            raise RuntimeError(f"exit code {done.exit_code}: {done.stderr or done.stdout}")
        return done.stdout

    return run


def llm_sandbox_bwrap(setup: dict[str, Any]) -> Run:
    from llm_sandbox.local.config import LocalSandboxConfig

    config = LocalSandboxConfig(python_executable=setup["python"])
    return llm_sandbox(setup, backend="bubblewrap", bwrap_path=setup["bwrap"], sandbox_config=config)


def llm_sandbox_docker(setup: dict[str, Any]) -> Run:
    if setup["image"] is None:
        raise RuntimeError("no daemon or no image")
    # It asks for `python`, which an image may have by the name python3 only; and for the user root by number.
    config = {
        "network_mode": "none",
        "command": ["sleep", "3600"],
        "user": "0",
        "volumes": {folder_of_python("/usr/bin/python3"): {"bind": "/opt/python", "mode": "ro"}},
        "environment": {"PATH": "/opt/python:/usr/local/bin:/usr/bin:/bin"},
    }
    return llm_sandbox(setup, backend="docker", image=setup["image"], workdir="/tmp", runtime_configs=config)


ENDS: list[Callable[[], Any]] = []
PEERS: dict[str, tuple[str, Callable[[dict[str, Any]], Run]]] = {
    "llm-sandbox bwrap": ("llm-sandbox", llm_sandbox_bwrap),
    "llm-sandbox docker": ("llm-sandbox", llm_sandbox_docker),
    "skyrl-gym": ("skyrl-gym", skyrl_gym),
    "verifiers": ("verifiers", verifiers),
}


def main() -> None:
    setup = json.loads(sys.argv[1])
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    for name, (package, make) in PEERS.items():
        label = name
        try:
            label = name.replace(package, f"{package} {version(package)}")
            run = make(setup)
            if run().strip() != "1":
                raise RuntimeError("its first run printed something else")
            runs[label] = run
        except Exception as error:  # whatever it is: the table says so
            failures[label] = f"{type(error).__name__}: {error}"
    for line in sys.stdin:
        name = line.strip()
        answer = dict.fromkeys(runs, "") | failures if name == "names" else {"printed": runs[name]()}
        print(json.dumps(answer), flush=True)
    for end in ENDS:
        with contextlib.suppress(Exception):  # of one that could not even be opened
            end()


if __name__ == "__main__":
    main()
