"""Servers that are started here: how, who may see their keys, and that nothing of them is left behind.

All but one test run on a stand-in for the server; the last one on the real one.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_sglang import sglang_python
from sglang_standin import make_standin
from tiny_models import make_model

from pace_agent.cli import main
from pace_agent.engine.sglang.serving import keeping
from pace_agent.engine.sglang.serving.keeping import free_ports, status_of
from pace_agent.engine.sglang.serving.launch import ServerOptions, Servers, launch, server_command
from pace_agent.errors import RunError, UserError

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)]


def all_pids(servers: Servers) -> list[int]:
    return [*servers.pids().values(), *(pid for log in servers.logs for pid in children(log))]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# Starting


def test_servers_start_serve_and_leave_nothing(python: str, model: Path, tmp_path: Path) -> None:
    with launch(ServerOptions(servers=2, python=python), model, tmp_path / "logs") as servers:
        pids = all_pids(servers)
        assert len(set(pids)) == 4
        assert all(map(is_alive, pids))
        assert len(set(servers.urls)) == 2
        assert list(servers.pids()) == list(servers.urls)
        for url in servers.urls:
            assert status_of(port_of(url), "/model_info", servers.keys.api) == 200
            assert status_of(port_of(url), "/model_info", servers.keys.admin) == 401
    assert not any(map(is_alive, pids))
    assert servers.pids() == {}


def test_keys_are_in_no_list_of_processes_and_in_no_open_file(python: str, model: Path, tmp_path: Path) -> None:
    with launch(ServerOptions(python=python), model, tmp_path) as servers:
        keys = [servers.keys.api, servers.keys.admin]
        said = servers.logs[0].read_text()
        assert f"keys {keys[0]} {keys[1]} 0o600" in said
        assert servers.logs[0].stat().st_mode & 0o777 == 0o600
        assert keys[0] != keys[1]
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    command = (process / "cmdline").read_text(errors="replace")
                except OSError:
                    continue
                assert not any(key in command for key in keys)
        secret = Path(json.loads(re.findall("^flags (.*)$", said, re.MULTILINE)[0])[7])
        assert secret.name == "secret.yaml"
        until(lambda: not secret.parent.exists())  # it was read, and is needed no more


def test_keys_of_the_environment_are_used(
    python: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "one")
    monkeypatch.setenv("MY_ADMIN", "two")
    with launch(ServerOptions(python=python, admin_key_env="MY_ADMIN"), model, tmp_path) as servers:
        assert (servers.keys.api, servers.keys.admin) == ("one", "two")
        assert status_of(port_of(servers.urls[0]), "/model_info", "one") == 200
        assert "key seen False" in servers.logs[0].read_text()
    monkeypatch.setenv("SGLANG_API_KEY", "-x")
    with pytest.raises(UserError, match="key in SGLANG_API_KEY"):
        launch(ServerOptions(python=python), model, tmp_path)


def test_gpus_and_flags(python: str, model: Path, tmp_path: Path) -> None:
    first = free_ports(1)[0]
    options = ServerOptions(
        servers=2,
        gpus=(3, 1, 0, 2),
        tensor_parallel=2,
        python=python,
        port=first,
        args=("--dtype", "float32", "--new=1"),
    )
    with launch(options, model, tmp_path) as servers:
        assert servers.urls == (f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}")
        assert servers.gpus == ((3, 1), (0, 2))
        said = [log.read_text() for log in servers.logs]
    assert ["gpus 3,1 " in said[0], "gpus 0,2 " in said[1]] == [True, True]
    flags = json.loads(re.findall("^flags (.*)$", said[0], re.MULTILINE)[0])
    assert flags[-3:] == ["--dtype", "float32", "--new=1"]  # the user's come last
    assert flags[flags.index("--tp-size") + 1] == "2"
    assert flags[flags.index("--model-path") + 1] == str(model)


def test_a_tokenizer_is_loaded_where_there_is_one(model: Path) -> None:
    assert "--skip-tokenizer-init" in server_command(ServerOptions(), model, 1)
    (model / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in server_command(ServerOptions(), model, 1)
    assert "--skip-tokenizer-init" in server_command(ServerOptions(skip_tokenizer=True), model, 1)


# What goes wrong


def test_a_server_that_ends_at_once_shows_its_log(python: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        launch(ServerOptions(python=python, servers=2, args=("--fail",)), model, tmp_path)
    said = str(caught.value)
    assert "ended with exit code 7" in said
    assert "the model is broken" in said
    assert "sglang.launch_server --model-path" in said
    assert "keys *** ***" in said


def test_a_server_that_never_gets_ready_is_stopped(python: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"was not ready after 0\.5 s"):
        launch(ServerOptions(python=python, args=("--deaf",), start_seconds=0.5), model, tmp_path)
    assert not any(map(is_alive, children(tmp_path / "sglang-0.log")))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"python": "/nowhere/python"}, "sglang.python = '/nowhere/python' can't be run"),
        ({"python": sys.executable}, "pip install sglang"),
        ({"args": ("--port=3",)}, "can't hold --port"),
        ({"args": ("--api-key", "x")}, "the keys come from the environment"),
        ({"gpus": (0,), "servers": 2}, "need 2"),
    ],
)
def test_what_the_user_got_wrong(options: dict[str, Any], part: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        launch(ServerOptions(**options), model, tmp_path)


def test_a_taken_port(python: str, model: Path, tmp_path: Path) -> None:
    with launch(ServerOptions(python=python), model, tmp_path) as servers:
        port = port_of(servers.urls[0])
        with pytest.raises(UserError, match=f"port {port} of this machine is taken"):
            launch(ServerOptions(python=python, port=port), model, tmp_path)


# Ends


def test_a_killed_server_is_started_again_until_it_is_given_up(
    python: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(ServerOptions(python=python, servers=2), model, tmp_path) as servers:
        url, other = servers.urls
        for _ in range(keeping.MAX_RESTARTS):
            killed = servers.pids()[url]
            os.kill(killed, signal.SIGKILL)
            until(lambda: servers.pids().get(url, killed) != killed)  # noqa: B023
            until(lambda: status_of(port_of(url), "/model_info", servers.keys.api) == 200)
        assert servers.given_up() == ()
        os.kill(servers.pids()[url], signal.SIGKILL)
        until(servers.given_up)
        assert servers.given_up() == (url,)
        assert list(servers.pids()) == [other]
        assert not any(map(is_alive, children(servers.logs[0])))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("was ended by signal 9" in line and "gpus" in line for line in warnings) == keeping.MAX_RESTARTS
    assert "given up" in next(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)


def test_a_server_that_ignores_the_signal_is_killed(
    python: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pace_agent.engine.sglang.serving.processes.GRACE_SECONDS", 0.3)
    with launch(ServerOptions(python=python, args=("--stubborn",)), model, tmp_path) as servers:
        pids = all_pids(servers)
    assert not any(map(is_alive, pids))


OWNER = """
import os, sys, threading, time
from pathlib import Path
from pace_agent.engine.sglang.serving.launch import ServerOptions, launch
servers = []
def start():  # in a thread that ends: the servers must not end with it
    servers.append(launch(ServerOptions(python=sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.5)
print(servers[0].pids()[servers[0].urls[0]], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_the_process_that_started_them(
    python: str, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", OWNER, python, str(model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()), *children(tmp_path / "sglang-0.log")]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        owner.send_signal(number)
    until(lambda: not any(map(is_alive, pids)))


def test_servers_end_with_their_guard(python: str, model: Path, tmp_path: Path) -> None:
    with launch(ServerOptions(python=python), model, tmp_path) as servers:
        pid = servers.pids()[servers.urls[0]]
        guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        until(lambda: servers.pids().get(servers.urls[0]) not in (None, pid))
    for child in children(servers.logs[0])[:1]:
        os.kill(child, signal.SIGKILL)  # it left its session, and nobody was there to see it


# The command


SERVE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where it was started in the background
from pace_agent.cli import main
sys.exit(main())
"""


def serve(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVE, "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    make_model(0).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_tells_how_to_attach_and_ends_well(
    python: str, tiny: Path, tmp_path: Path, number: signal.Signals
) -> None:
    places = ["--run-dir", str(tmp_path / "logs"), "--sglang.python", python]
    with serve(str(tiny), "--gpus", "1,0", *places, "--", "--dtype", "float16") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(6)]
        pids = [int(line.split()[2]) for line in lines[:2]]
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 0
    assert not any(map(is_alive, pids))
    assert ["gpus 1 " in lines[0], "gpus 0 " in lines[1]] == [True, True]
    assert re.fullmatch(r"export SGLANG_API_KEY=\w{48}", lines[3])
    urls = ",".join(line.split()[0] for line in lines[:2])
    assert lines[5] == f"pace-agent train --engine.kind sglang --sglang.urls {urls} --model {tiny}"
    assert '"--dtype", "float16"]' in (tmp_path / "logs" / "sglang-0.log").read_text()


def test_serve_ends_when_no_server_is_left(python: str, tiny: Path, tmp_path: Path) -> None:
    with serve(str(tiny), "--run-dir", str(tmp_path / "logs"), "--sglang.python", python) as process:
        assert process.stdout is not None
        url, _, pid, *_ = process.stdout.readline().split()
        while process.poll() is None:
            if is_alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
            pid = next_pid(tmp_path / "logs" / "sglang-0.log", port_of(url)) or pid
        said = process.communicate()[1]
    assert process.returncode == 1
    assert "no server is left" in said
    assert "Starting it again (3 of 3)" in said


def next_pid(log: Path, port: int) -> str | None:
    """The process that listens on a port now, by its command."""
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
        except OSError:
            continue
        if str(port).encode() in command and b"sglang.launch_server" in command:
            return process.name
    return None


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/nowhere"], "there is no such folder"),
        (["MODEL", "--device", "tpu"], "sglang.device = 'tpu'"),
        (["MODEL", "--gpus", "0,1,2", "--servers", "2"], "sglang.gpus = [0, 1, 2] are 3"),
        (["MODEL", "--sglang.urls", "http://localhost:1"], "names running ones"),
        (["MODEL", "--sglang.python", sys.executable], "pip install sglang"),
    ],
)
def test_serve_refuses(arguments: list[str], part: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *(str(tiny) if word == "MODEL" else word for word in arguments)]) == 2
    assert part in capsys.readouterr().err


# The real server


@pytest.mark.timeout(600)
def test_the_real_server_starts_with_keys_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    options = ServerOptions(device="cpu", python=sglang_python(), context=96)
    with launch(options, tiny, tmp_path) as servers:
        port, (pid,) = port_of(servers.urls[0]), servers.pids().values()
        session = [int(path.name) for path in Path("/proc").iterdir() if is_in_session(path.name, os.getsid(pid))]
        assert len(session) > 3  # the guard, the server, its scheduler and its detokenizer
        assert [status_of(port, "/model_info", key) for key in ("", servers.keys.api)] == [401, 200]
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert servers.keys.api not in command
        assert "96" in command
    assert not any(map(is_alive, session))


def is_in_session(name: str, session: int) -> bool:
    try:
        return name.isdigit() and os.getsid(int(name)) == session
    except ProcessLookupError:
        return False
