"""The real SGLang server on a CPU, for tests: found, started, killed, started again.

The interpreter that has SGLang is the one of PACE_AGENT_SGLANG_PYTHON, else the one that `.ci/run` keeps in the cache.
Without either a test is skipped, and fails where CI=true.

What always holds:

* No process outlives the `with` block: the server leads a process group, which is killed as a whole.
* Nor does one outlive a killed pytest: the system kills the server with the thread that started it, and the server's
  processes end with it. So don't start one from a thread that ends before the server may.

A test that starts more than one needs `pytest.mark.timeout(600)`.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 240.0
"""Of the 300 s that pytest gives a test with its fixtures. On a free core a start takes under a minute."""
STOP_SECONDS = 15.0
FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--grammar-backend", "none", "--mem-fraction-static", "0.1", "--max-total-tokens", "8192"),
    *("--weight-version", "0", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
)
"""The warm-up would generate while a test already pauses; an idle scheduler would take a whole core."""
# Asks for SIGKILL when the parent goes (1 is PR_SET_PDEATHSIG), looks whether it is gone already, becomes the server.
BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def sglang_python() -> str:
    """The interpreter that has SGLang. Skips the test where there is none, or fails it."""
    if named := os.environ.get("PACE_AGENT_SGLANG_PYTHON"):
        if not Path(named).exists():
            pytest.fail(f"PACE_AGENT_SGLANG_PYTHON names {named}, which doesn't exist")
        return named
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("PACE_AGENT_CACHE") or Path(cache) / "pace-agent") / "sglang-cpu"
    if (folder / "pace-agent-recipe").exists() and (folder / "bin" / "python").exists():
        return str(folder / "bin" / "python")
    reason = f"no SGLang for a CPU in {folder}: run `python scripts/sglang_cpu.py {folder}`"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def real_sglang(model: Path, logs: Path, *flags: str, env: Mapping[str, str] = {}) -> Iterator["RealServer"]:
    """A server for the folder `model`, on a free port of this machine, that answers. Its log goes to `logs`.

    `flags` come after `FLAGS` and win over them, `env` over this process's environment.
    """
    server = RealServer(sglang_python(), model, logs, flags, env)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class RealServer:
    """One server, which may be killed and started again on its port. Made by `real_sglang`."""

    def __init__(self, python: str, model: Path, logs: Path, flags: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = logs / f"sglang-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        where = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port))
        server = (python, "-m", "sglang.launch_server", *where, *FLAGS, *flags)
        self._command = (python, "-I", "-S", "-c", BOUND_TO_PARENT, str(os.getpid()), *server)
        # A Python path would lay this environment's packages over the server's.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        self._env = {**kept, **ours, **env}

    @property
    def pid(self) -> int:
        """Of the HTTP process, the parent of the scheduler's and the detokenizer's."""
        assert self.process is not None, "the server is stopped"
        return self.process.pid

    def start(self) -> None:
        """Returns when the server answers. Raises with the end of its log if it exits, or doesn't answer in time."""
        assert self.process is None, "the server runs already"
        with self.log.open("ab") as log:
            # In a folder of its own: `-m` would import from the checkout first.
            self.process = subprocess.Popen(
                self._command,
                env=self._env,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"SGLang exited with code {code}:\n{self.log_end()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not answer within {START_SECONDS:g} s:\n{self.log_end()}")
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL for all of its processes at once, as when a machine dies. Does nothing where none runs."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):  # gone already, with all of its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """The orderly way: SIGTERM, and SIGKILL for whatever is left."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def restart(self) -> None:
        """Killed if it runs, then started on the same port, with the model's weights and version of the beginning."""
        self.kill()
        self.start()

    def answers(self) -> bool:
        """Whether it is up; one that wants a key is."""
        try:
            with DIRECT.open(f"{self.url}/model_info", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return error.code == 401
        except OSError:
            return False

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        with DIRECT.open(self.url + path, timeout=60) as response:
            return json.load(response)

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """What comes back, to the end of the stream if it is one. Raises `HTTPError` for a refusal."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method="POST")
        with DIRECT.open(request, timeout=60) as response:
            answer: bytes = response.read()
            return answer

    def log_end(self, lines: int = 30) -> str:
        """Its lines cut short: one of SGLang's own has ten thousand characters."""
        return "\n".join(line[:500] for line in self.log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
