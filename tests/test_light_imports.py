"""What must be quick to start loads nothing heavy. Each case runs in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

import pace_agent

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "ray",
    "docker",
    "sglang",
    "httpx",
    "matplotlib",
    "sympy",
    "math_verify",
)

REPORT = f"import sys; print('LOADED', sorted(set({HEAVY!r}) & sys.modules.keys()))"


def heavy_modules(code: str, folder: Path) -> str:
    """What of HEAVY is loaded after `code`. The working folder is empty, so that no checkout stands in the way."""
    home = str(Path(pace_agent.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
        cwd=folder,
        env={"PYTHONPATH": home, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    assert heavy_modules("import pace_agent", tmp_path) == "LOADED []"


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "train --help",
        "serve --help",
        "version",
        "config show --pool.policy sync --trainer.max_steps 3",
        "env list --json",
    ],
)
def test_a_light_command_is_light(arguments: str, tmp_path: Path) -> None:
    code = f"""
from pace_agent.cli import main
try:
    code = main({arguments.split()!r})
except SystemExit as end:
    code = end.code
assert not code, code
"""
    assert heavy_modules(code, tmp_path) == "LOADED []"


def test_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    assert heavy_modules("import sympy", tmp_path) == "LOADED ['sympy']"
