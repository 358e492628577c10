"""Where the package under test and, when there is one, its checkout lie."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pace_agent

ROOMS = ("envs", "tools", "sandbox", "trainers")
CHECKOUT = Path(__file__).resolve().parent.parent


def package_folder(package: str) -> Path:
    """The folder of a package, found as Python finds it: in a checkout or in an installed wheel."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} can't be found"
    assert spec.submodule_search_locations, f"{package} is not a package"
    return Path(next(iter(spec.submodule_search_locations)))


def modules() -> dict[str, Path]:
    """Every module of the package under test by its full name."""
    core = Path(pace_agent.__file__).parent
    found = {}
    for prefix, folder in [
        ("pace_agent", core),
        *((f"pace_agent.{room}", package_folder(f"pace_agent.{room}")) for room in ROOMS),
    ]:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([prefix, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


def pyproject() -> dict[str, Any]:
    """The checkout's pyproject.toml; the tests themselves always lie in a checkout."""
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
