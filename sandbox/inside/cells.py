"""The kernel: the process that runs cells of Python, and keeps their names."""

# ruff: noqa: SIM115 - contextlib is an import that every session would pay for
from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which cost more than a short cell
import os
import sys
from types import ModuleType

from pace_agent.sandbox.inside.frames import receive, send
from pace_agent.sandbox.inside.processes import first_to_die

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn

    Header = dict[str, Any]

INTERRUPT = (_signal.SIGINT,)


def show(error: BaseException) -> None:
    """Print a traceback as Python does, without our own frames."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == show.__code__.co_filename:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def execute(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a cell; print the value of a last expression as the interactive interpreter does."""
    import ast
    import linecache

    # Tracebacks of this and of later cells find their lines here.
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace))


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> Header:
    """{exit_code, oom} of one cell. SIGINT comes in blocked with its handler set, and goes out ignored."""
    kernel = os.getpid()
    code, oom = 1, False
    try:
        try:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, INTERRUPT)
            execute(source, name, namespace)
            code = 0
        finally:
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = int(error.code or 0)
        else:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        oom = isinstance(error, MemoryError)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        try:
            show(error)
        except BaseException as second:
            os.write(2, f"{type(error).__name__} (its traceback failed: {type(second).__name__})\n".encode())
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            code = code or 1
    if os.getpid() != kernel:
        os._exit(code & 0xFF)  # a child that the cell forked came out at the cell's end
    return {"exit_code": code, "oom": oom}


def open_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = [""]


def preload(names: Iterable[str], root: str) -> str:
    """Load what the code may find loaded; what went wrong, or nothing."""
    # The first cell, and the first that raises, want these: a warm room pays while nobody waits.
    import ast  # noqa: F401
    import linecache  # noqa: F401
    import site
    import traceback  # noqa: F401

    site.main()
    for name in names:
        try:
            __import__(name)
        except BaseException as error:
            return f"can't load {name} with {sys.executable}: {type(error).__name__}: {error}"
    sys.path.insert(0, root)  # after the loading: nothing of the room is loaded in its place
    return ""


def new_main() -> dict[str, Any]:
    """The names of a fresh `__main__`."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    return module.__dict__


def kernel_main(requests: int, reports: int, root: str, modules: Iterable[str]) -> NoReturn:
    """The process that runs cells, one after the other. Its first report tells whether `modules` are loaded."""
    first_to_die()
    open_streams()
    send(reports, {"op": "loaded", "error": preload(modules, root)})
    namespace = new_main()
    cell = 0
    while (frame := receive(requests)) is not None:
        cell += 1
        # An interrupt from here on waits until the code runs; the supervisor sends none while it would be ignored.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, INTERRUPT)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        source = frame[1].decode("utf-8", "surrogatepass")
        send(reports, run_cell(source, f"<cell {cell}>", namespace))
    os._exit(0)
