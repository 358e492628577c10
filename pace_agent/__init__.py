"""Agentic multi-turn RL: tool environments, asynchronous rollouts, and the PACE pool.

Importing this package loads no torch; heavy parts load where they are used.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_here = Path(__file__).resolve().parent
if not (_here / "envs").is_dir():
    # A checkout keeps envs/, tools/, trainers/ and sandbox/ beside this folder; an installed wheel keeps them in it.
    __path__.append(str(_here.parent))

try:
    __version__ = version("pace-agent")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+checkout"

__all__ = ["__version__"]
