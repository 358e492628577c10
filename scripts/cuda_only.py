"""Stand-ins for packages that SGLang imports on every machine and that exist for CUDA only, or that no test needs.

`sglang_cpu.py` copies this file into its environment, where a .pth file calls `install` when the interpreter starts.

Importing such a package, and any name out of it, works: names are classes, good for annotations and as bases. Calling
one raises. Whoever asks with `importlib.util.find_spec` whether the package is there hears that it isn't.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = frozenset({"av", "decord", "sgl_kernel", "timm", "torchvision"})


class AbsentType(type):
    """The type of every name in an absent package; its attributes are such names again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__qualname__} was called, but its package isn't in this environment")


class AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the absent packages, and nothing in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not is_absent(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def absent(name: str) -> Any:
    return AbsentType(name.rpartition(".")[2], (), {"__qualname__": name})


def is_absent(name: str) -> bool:
    return name.partition(".")[0] in ABSENT


def install() -> None:
    """Let imports find the stand-ins, after everything that is really there, and `find_spec` find none."""
    sys.meta_path.append(Finder())
    really = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if is_absent(name) else really(name, package)

    importlib.util.find_spec = find_spec
