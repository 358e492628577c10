"""Runs test files again with the rights of a user who owns nothing."""

import os
import subprocess
import sys
from pathlib import Path

from pace_agent.sandbox.launcher import mounts

HERE = Path(__file__).resolve().parent


def passes(files: list[str], selected: str) -> str:
    """What pytest said; AssertionError unless all that is `selected` in these files of this folder passed."""
    folders = [os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, HERE.parent)]
    pytest_arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-k", selected]
    pytest_arguments += [str(HERE / name) for name in files]
    become = f"""
import os, sys
sys.path.insert(0, {str(Path(mounts.__file__).parent)!r})
from mounts import expose
expose({folders!r}, 12345)
os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)
os.execv(sys.executable, {pytest_arguments!r})
"""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",  # what is tested there is what is tested here, installed or not
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", become], env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout
