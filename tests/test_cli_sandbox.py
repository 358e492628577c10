"""`pace-agent sandbox check` and `sandbox run`, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rooms

pytestmark = rooms.needs_namespaces


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pace_agent", "sandbox", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def test_run_gives_input_and_hands_back_output_and_status(program: Path) -> None:
    program.write_text("import sys\nprint(int(input()) * 2)\nprint('bad', file=sys.stderr)\nsys.exit(3)")
    done = run("run", str(program), stdin="21\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "42\n", "bad\n")
    program.write_text("if __name__ == '__main__': print('main')")
    assert run("run", str(program)).stdout == "main\n"


@pytest.mark.parametrize("backend", rooms.EVERY)
def test_run_takes_any_setting(program: Path, backend: str) -> None:
    program.write_text("while True: pass")
    unsafe = ["--sandbox.unsafe"] if backend == "subprocess" else []
    done = run("run", str(program), "--sandbox.timeout", "0.5", "--sandbox.backend", backend, *unsafe)
    assert done.returncode == 124
    assert "timeout after" in done.stderr


def test_run_as_json(program: Path) -> None:
    program.write_text("1 / 0")
    done = run("run", str(program), "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["outcome"], facts["exit_code"]) == (1, "nonzero", 1)
    assert "ZeroDivisionError" in facts["stderr"]


def test_run_reads_a_program_from_standard_input() -> None:
    assert run("run", "-", stdin="print(6 * 7)").stdout == "42\n"


def test_mistakes_are_told(program: Path) -> None:
    missing = run("run", str(program))
    assert missing.returncode == 2
    assert "can't be read" in missing.stderr
    program.write_text("1")
    for arguments, said in (
        (["--sandbox.backend", "subprocess"], "sandbox.unsafe"),
        (["--sandbox.backend", "dokcer"], "sandbox.backend"),
        (["--sandbox.image", "x"], "sandbox.image"),
        (["--sandbox.modules", '["no_such_module"]'], "can't load no_such_module"),
    ):
        done = run("run", str(program), *arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_check_attacks_what_works_here() -> None:
    done = run("check", "--all", "--sandbox.backend", "bwrap")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attacks contained" in done.stdout
    assert "read a host file" in done.stdout
    facts = json.loads(run("check", "--json", "--sandbox.backend", "bwrap").stdout)
    assert facts["backends"] == [{"backend": "bwrap", "available": True, "reason": "", "remedy": ""}]
    assert {*facts["probes"]} == {"bwrap session", "bwrap fresh"}
    assert all(each["contained"] for kind in facts["probes"].values() for each in kind)


def test_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    done = run("check", "--quick")
    assert done.returncode == 0
    assert "no Docker daemon answers" in done.stdout
    assert run("check", "--quick", "--sandbox.backend", "docker").returncode == 1
