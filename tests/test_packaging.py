"""What pyproject.toml says is what lies in the tree, and what lies in the tree is what gets installed."""

import importlib.util
import runpy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from source_tree import CHECKOUT, package_folder, pyproject

import pace_agent

SETUPTOOLS = pyproject()["tool"]["setuptools"]


def mapped_packages() -> dict[str, Path]:
    """Every package in the checkout by the name that it is imported by."""
    found = {}
    for package, folder in SETUPTOOLS["package-dir"].items():
        root = CHECKOUT / folder
        for path in [root, *root.rglob("*")]:
            if path.is_dir() and path.name != "__pycache__" and any(path.glob("*.py")):
                found[".".join([package, *path.relative_to(root).parts])] = path
    return found


def test_the_package_list_is_the_tree() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(mapped_packages())


def test_no_package_is_listed_twice() -> None:
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_every_package_has_an_init_file() -> None:
    assert [name for name, path in mapped_packages().items() if not (path / "__init__.py").is_file()] == []


def test_every_module_of_the_tree_is_found_where_the_package_is_installed() -> None:
    missing = []
    for package, folder in mapped_packages().items():
        installed = package_folder(package)
        missing += [f"{package}/{path.name}" for path in folder.glob("*.py") if not (installed / path.name).is_file()]
    assert missing == []


@pytest.mark.parametrize(("package", "patterns"), SETUPTOOLS["package-data"].items())
def test_package_data_is_installed(package: str, patterns: list[str]) -> None:
    folder = mapped_packages()[package]
    data = [path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    installed = package_folder(package)
    assert [str(path) for path in data if not (installed / path).is_file()] == []


def test_types_are_marked() -> None:
    assert (package_folder("pace_agent") / "py.typed").is_file()


def test_the_version_is_the_installed_one() -> None:
    try:
        expected = version("pace-agent")
    except PackageNotFoundError:
        expected = "0+checkout"
    assert pace_agent.__version__ == expected


def test_a_foreign_folder_of_the_same_name_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own tools/ folder must neither replace ours nor be replaced by it."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("OWNER = 'user'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_folder("pace_agent.tools") != tmp_path / "tools"
    theirs = importlib.util.find_spec("tools")
    assert theirs is not None
    assert theirs.origin == str(tmp_path / "tools" / "__init__.py")


def test_a_static_checker_sees_every_package(tmp_path: Path) -> None:
    """The links that mypy reads show each package at the place of its import name; a second run changes nothing."""
    target = tmp_path / "pace_agent"
    script = runpy.run_path(str(CHECKOUT / ".ci" / "links"))
    script["make_links"](target)
    script["make_links"](target)
    names = [name.split(".")[1:] for name in SETUPTOOLS["packages"]]
    assert [parts for parts in names if not target.joinpath(*parts, "__init__.py").is_file()] == []
