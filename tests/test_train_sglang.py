"""Training over SGLang servers that die and return. They are fakes, in processes of their own; the rest is real."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_sglang import free_port
from test_train import OWN_ENV, SMALL, check_law

from pace_agent.rollout.journal import read_lines

LUCKY = """
class Lucky(Short):
    '''A fake server answers all members of a group alike, so chance tells them apart.'''
    def reward(self, answer: str, task: Task) -> float:
        return random.random()
"""
FAKE = Path(__file__).with_name("fake_sglang.py")
SEED = ("--stop-rate", "0.15", "--token-seconds", "0.004", "--stream-interval", "1", "--incremental")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A fake server as a process, which can be killed and started again on its port, where it has version 0."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        size = ("--vocab-size", "512", "--context-length", "512")
        command = [sys.executable, str(FAKE), "--port", str(self.port), *size, *SEED]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def state(self) -> dict[str, Any]:
        with DIRECT.open(f"{self.url}/fake/state", timeout=30) as response:
            found: dict[str, Any] = json.load(response)
            return found


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server(), Server()]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.kill()


class Training:
    """`pace-agent train` as a process. Its messages go to a file."""

    def __init__(self, folder: Path, servers: list[Server], *options: str) -> None:
        (folder / "mine.py").write_text(OWN_ENV + LUCKY)
        self.run, self.said_file = folder / "run", folder / "said"
        urls = json.dumps([server.url for server in servers])
        command = [sys.executable, "-m", "pace_agent", "train", *SMALL]
        command += [] if "--resume" in options else ["--run-dir", str(self.run)]
        command += [
            "--env",
            f"{folder}/mine.py:Lucky",
            "--rollout.max_turn_tokens",
            "24",
            "--run.checkpoint_every",
            "50",
        ]
        command += ["--engine.kind", "sglang", "--sglang.urls", urls, "--sglang.stream_interval", "1", *options]
        with self.said_file.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
            )

    def said(self) -> str:
        return self.said_file.read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def oldest_stamp(run: Path, after: int) -> int:
    """Among the rollouts that were trained a few steps after that one."""
    lines = [line for line in read_lines(run / "trajectories.jsonl") if line["fate"] == "trained"]
    late = [line for line in lines if line["step"] > after + 3]
    return min(stamp[0] for line in late for turn in line["turns"] for stamp in turn["stamps"])


def test_training_outlives_its_servers(tmp_path: Path, servers: list[Server]) -> None:
    one, other = servers
    training = Training(tmp_path, servers, "--trainer.max_steps", "10")
    try:
        training.until(lambda: training.steps() >= 2)
        other.kill()
        training.until(lambda: f"{other.url} is out" in training.said())
        reached = training.steps()
        training.until(lambda: training.steps() >= reached + 2)
        one.kill()
        training.until(lambda: "no SGLang server is left" in training.said())
        other.start()
        training.until(lambda: f"{other.url} serves again" in training.said())
        assert training.process.wait(120) == 0, training.said()
    finally:
        training.close()
    assert "/update_weights_from_disk" in [path for path, _ in other.state()["calls"]]
    found = check_law(training.run)
    assert found["policy_version"] == 10
    assert found["ledger"]["failed"] == 0
    assert oldest_stamp(training.run, after=reached) > 0


def test_a_run_whose_servers_stay_away_ends_with_the_reason(tmp_path: Path, servers: list[Server]) -> None:
    training = Training(tmp_path, servers, "--trainer.max_steps", "100", "--sglang.wait_seconds", "3")
    try:
        training.until(lambda: training.steps() >= 1)
        for server in servers:
            server.kill()
        assert training.process.wait(120) == 1, training.said()
    finally:
        training.close()
    assert "no SGLang server came back within 3 s" in training.said()
    assert "go on with: pace-agent train --resume" in training.said()
    ended = check_law(training.run)
    assert ended["ledger"]["failed"] == 0
    for server in servers:
        server.start()
    again = Training(tmp_path, servers, "--resume", str(training.run), "--trainer.max_steps", str(ended["steps"] + 2))
    try:
        assert again.process.wait(120) == 0, again.said()
    finally:
        again.close()
    assert check_law(training.run)["steps"] == ended["steps"] + 2
