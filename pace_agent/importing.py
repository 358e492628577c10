"""Objects by name: `package.module:Name` and `path/to/file.py:Name`, found alike in every process.

The current directory is importable, as it is for `python -m`. A file is loaded once per process under a module name
made from its path, so that asking twice gives the same object.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pace_agent.errors import UserError, did_you_mean


def is_import_path(text: str) -> bool:
    """Whether this has the shape `module:Name` or `file.py:Name`."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and name.isidentifier()


def load_object(target: str) -> Any:
    """Import what `target` names; UserError says which part was not found and what is near."""
    module_name, colon, name = target.rpartition(":")
    if not (colon and module_name and name.isidentifier()):
        raise UserError(f"{target!r} is not an import path: expected 'package.module:Name' or 'path/to/file.py:Name'")
    module = load_file(Path(module_name)) if module_name.endswith(".py") else load_module(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [each for each in vars(module) if not each.startswith("_")]
        raise UserError(f"{target!r}: {module_name!r} has no {name!r}.{did_you_mean(name, known)}") from None


def load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise UserError(f"there is no module {name!r} here or among what is installed") from None
        raise UserError(f"module {name!r} needs {missing!r}, which is not installed") from error
    except Exception as error:
        raise UserError(f"module {name!r} failed to import: {type(error).__name__}: {error}") from error


def load_file(path: Path) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        near = [each.name for each in full.parent.glob("*.py")] if full.parent.is_dir() else []
        raise UserError(f"there is no file {str(path)!r}.{did_you_mean(full.name, near)}")
    name = f"{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise UserError(f"{str(path)!r} can't be read as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{str(path)!r} failed to import: {type(error).__name__}: {error}") from error
    return module
