"""What runs inside a sandbox: a supervisor, and apart from it the kernel that runs the code.

Standalone: one file however long, standard library only, Python 3.9 or later, because it is handed to an interpreter
that sees nothing of this package. It imports little, because every session pays for it.

The supervisor holds the one socket to the host and never runs a line of the model's. It starts the kernel (a fork
that keeps a Python namespace), starts commands, reads what they write into bounded buffers, and kills.

A frame is `!II` (length of header, length of body), a JSON header, a body. Requests: run, exec, put, get, reset, and
while one of these is going on, interrupt and kill with its id. Each request gets one reply.

What always holds:

* A reply holds at most the limits that were set at the start, whatever was written.
* After a deadline (`interrupt` with `sweep`, or `kill`) every process but supervisor and kernel is gone before the
  reply.
* Without a namespace of its own it signals only processes below itself.

What is not promised: code that runs in the same sandbox can disturb or impersonate this process. The host believes
nothing in a reply beyond its form, keeps its own deadline, and then ends the whole sandbox.
"""

# ruff: noqa: SIM105, SIM115 - contextlib is an import that every session would pay for
from __future__ import annotations

import errno
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Header = dict[str, Any]

CHUNK = 1 << 16
FLOOD_FACTOR = 16
"""A call that writes this many times what is kept is interrupted."""
GRACE = 1.0
"""Seconds between an interrupt for a flood and the kill."""
HEADER = struct.Struct("!II")
NOTHING = b""


def send(fd: int, header: Header, *bodies: bytes) -> None:
    text = json.dumps(header).encode()
    data = b"".join((HEADER.pack(len(text), sum(map(len, bodies))), text, *bodies))
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive_exactly(fd: int, size: int) -> bytes | None:
    """`size` bytes, or None at the end of the stream."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(fd: int) -> tuple[Header, bytes] | None:
    """(header, body), or None at the end of the stream."""
    sizes = receive_exactly(fd, HEADER.size)
    if sizes is None:
        return None
    header_size, body_size = HEADER.unpack(sizes)
    data = receive_exactly(fd, header_size + body_size)
    if data is None:
        return None
    return json.loads(data[:header_size]), data[header_size:]


class Capture:
    """The head and the tail of a stream, at most `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self.half - len(self.head)
        if space > 0:
            self.head += data[:space]
            data = data[space:]
        self.tail += data
        if len(self.tail) > 2 * self.half + CHUNK:
            del self.tail[: -self.half]

    @property
    def cut(self) -> int:
        """Bytes that are not kept."""
        return max(self.total - 2 * self.half, 0)

    def text(self) -> bytes:
        if not self.cut:
            return bytes(self.head + self.tail)
        return b"".join((self.head, b"\n[... %d bytes cut ...]\n" % self.cut, self.tail[-self.half :]))


# ---------------------------------------------------------------------------------------------------- the kernel


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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            execute(source, name, namespace)
            code = 0
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = int(error.code or 0)
        else:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        oom = isinstance(error, MemoryError)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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


def kernel_main(requests: int, reports: int, root: str) -> NoReturn:
    """The process that runs cells, one after the other."""
    first_to_die()
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = [""]
    # The first cell, and the first that raises, find these loaded: a warm room pays while nobody waits.
    import ast  # noqa: F401
    import linecache  # noqa: F401
    import site
    import traceback  # noqa: F401

    site.main()
    sys.path.insert(0, root)
    own = sys.modules["__main__"]  # kept: its functions are still needed
    module = sys.modules["__main__"] = ModuleType("__main__")
    cell = 0
    while (frame := receive(requests)) is not None:
        cell += 1
        # An interrupt from here on waits until the code runs; the supervisor sends none before it reads `began`.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        send(reports, {"op": "began"})
        source = frame[1].decode("utf-8", "surrogatepass")
        send(reports, run_cell(source, f"<cell {cell}>", module.__dict__))
    del own
    os._exit(0)


def first_to_die() -> None:
    """Where memory runs out, the model's code goes before the supervisor, and long before the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as handle:
            handle.write("1000")
    except OSError:
        pass


def become_child(stdin: int, stdout: int, stderr: int) -> None:
    """In a fork of the supervisor: a session of its own, the given streams, signals as a program expects them."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if source != target:
            os.dup2(source, target)


class Kernel:
    """The process that runs cells, seen from the supervisor."""

    def __init__(self, host: int, root: str) -> None:
        far_requests, self.requests = os.pipe()
        self.reports, far_reports = os.pipe()
        self.out, far_out = os.pipe()
        self.err, far_err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become_child(0, far_out, far_err)
                for fd in (host, self.requests, self.reports, self.out, self.err, far_out, far_err):
                    os.close(fd)
                kernel_main(far_requests, far_reports, root)
            except BaseException as error:
                os.write(2, f"kernel: {error!r}\n".encode())
            finally:
                os._exit(70)
        for fd in (far_requests, far_reports, far_out, far_err):
            os.close(fd)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def close(self) -> None:
        for fd in (self.requests, self.reports, self.out, self.err):
            os.close(fd)


# ------------------------------------------------------------------------------------------------ the supervisor


def processes_below(root: int) -> set[int]:
    """Every living process below `root` in the tree of parents."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state, parent = handle.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            parents[int(name)] = (int(parent), state)
    below = {root}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in below} - below
        grown = bool(more)
        below |= more
    return {pid for pid in below - {root} if parents[pid][1] not in (b"Z", b"X")}


def processes_here() -> set[int]:
    """Every living process of this pid namespace but its first and ourselves."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state = handle.read().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if state not in (b"Z", b"X"):
                found.add(int(name))
    return found


class Call:
    """One run or exec while it is going on. Owns `given`, the near end of the process's standard input, or -1."""

    def __init__(self, number: int, group: int, out: int, err: int, captured: int) -> None:
        self.id = number
        self.group = group
        self.out = out
        self.err = err
        self.given = -1
        self.pending = memoryview(NOTHING)
        share = captured // 4
        self.captures = {out: Capture(captured - share), err: Capture(share)}
        self.flood_limit = FLOOD_FACTOR * captured
        self.flooded_at: float | None = None
        self.sweep = False
        """Whether everything that was started must be gone at the end."""
        self.killed = False
        self.began = True
        self.interrupted = False

    def read(self, fd: int) -> int:
        """Take what is there: bytes read, 0 at the end of the stream, -1 if nothing is there yet."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return -1
        self.captures[fd].add(data)
        return len(data)

    def drain(self) -> None:
        """Take what the pipes hold now, without waiting for whoever keeps them open."""
        for fd in (self.out, self.err):
            for _ in range(64):  # a pipe holds no more; another writer must not keep us here
                if self.read(fd) <= 0:
                    break

    def feed(self) -> bool:
        """Write what fits of the standard input; whether some is left."""
        try:
            self.pending = self.pending[os.write(self.given, self.pending[:CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.pending = self.pending[:0]
        return len(self.pending) > 0

    def close_given(self) -> None:
        if self.given >= 0:
            os.close(self.given)
            self.given = -1

    @property
    def written(self) -> int:
        return sum(capture.total for capture in self.captures.values())

    def interrupt(self) -> None:
        self.interrupted = True
        if self.began:
            try:
                os.killpg(self.group, signal.SIGINT)
            except ProcessLookupError:
                pass

    def result(self, status: int | None, report: Header, lost: bool) -> tuple[Any, ...]:
        """The reply: from the wait status of a process that ended, else from what it reported."""
        if status is None:
            exit_code, died_of = int(report.get("exit_code", 1)), 0
        else:
            exit_code = os.waitstatus_to_exitcode(status)
            died_of = max(-exit_code, 0)
        out, err = self.captures[self.out], self.captures[self.err]
        texts = out.text(), err.text()
        header = {
            "exit_code": exit_code,
            "signal": died_of,
            "oom": bool(report.get("oom")),
            "state_lost": lost,
            "cut": out.cut + err.cut,
            "out": len(texts[0]),
            "err": len(texts[1]),
        }
        return (header, *texts)


class Supervisor:
    def __init__(self, host: int, config: Header) -> None:
        self.host = host
        self.root: str = config["root"] or os.getcwd()
        self.captured: int = config["captured"]
        self.namespaced: bool = config["namespaced"]
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.chdir(self.root)
        self.kernel = Kernel(host, self.root)

    # -- requests

    def serve(self) -> None:
        send(self.host, {"op": "ready", "python": sys.version.split()[0]})
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 2)  # until here it told the host why a start failed
        os.close(nothing)
        while (frame := receive(self.host)) is not None:
            header, body = frame
            if header["op"] in ("interrupt", "kill"):
                continue  # for a call that has ended
            reply, *bodies = getattr(self, "op_" + header["op"])(header, body)
            send(self.host, {"id": header["id"], **reply}, *bodies)
        self.leave()

    def op_run(self, header: Header, body: bytes) -> tuple[Any, ...]:
        lost = bool(os.waitpid(self.kernel.pid, os.WNOHANG)[0])
        if lost:  # it ended between calls
            self.replace_kernel()
        kernel = self.kernel
        call = Call(header["id"], kernel.pid, kernel.out, kernel.err, self.captured)
        call.began = False
        try:
            send(kernel.requests, {}, body)
        except BrokenPipeError:
            pass  # it is dying, and the loop is about to see that
        status, report = self.watch(call, kernel.pid, kernel.reports)
        if status is not None:
            call.drain()
            self.replace_kernel()
        if call.sweep:
            self.sweep(keep={self.kernel.pid})
        return call.result(status, report, lost or status is not None)

    def op_exec(self, header: Header, body: bytes) -> tuple[Any, ...]:
        out, far_out = os.pipe()
        err, far_err = os.pipe()
        far_given, given = os.pipe() if body else (os.open("/dev/null", os.O_RDONLY), -1)
        call = Call(header["id"], -1, out, err, self.captured)
        call.given, call.pending = given, memoryview(body)
        try:
            call.group = pid = os.fork()
            if pid == 0:
                self.become_program(header["argv"], far_given, far_out, far_err)
            status, _ = self.watch(call, pid, None, (far_given, far_out, far_err))
            call.drain()
            if call.sweep:
                self.sweep(keep={self.kernel.pid})
            return call.result(status, {}, lost=False)
        except BlockingIOError as error:  # the limit on processes
            for fd in (far_given, far_out, far_err):
                os.close(fd)
            call.captures[err].add(f"can't start a process: {os.strerror(error.errno or 0)}\n".encode())
            return call.result(None, {"exit_code": 126}, lost=False)
        finally:
            call.close_given()
            os.close(out)
            os.close(err)

    def become_program(self, argv: list[str], stdin: int, stdout: int, stderr: int) -> NoReturn:
        try:
            become_child(stdin, stdout, stderr)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            first_to_die()
            os.chdir(self.root)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {os.strerror(error.errno or 0)}\n".encode(errors="replace"))
        except BaseException as error:
            os.write(2, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def op_put(self, header: Header, body: bytes) -> tuple[Any, ...]:
        try:
            fd = self.open_below(header["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, make_folders=True)
            with open(fd, "wb") as handle:
                handle.write(body)
        except OSError as error:
            return {"errno": error.errno or errno.EIO}, NOTHING
        return {}, NOTHING

    def op_get(self, header: Header, body: bytes) -> tuple[Any, ...]:
        try:
            with open(self.open_below(header["path"], os.O_RDONLY), "rb") as handle:
                data = handle.read(header["limit"] + 1)
        except OSError as error:
            return {"errno": error.errno or errno.EIO}, NOTHING
        if len(data) > header["limit"]:
            return {"too_large": True}, NOTHING
        return {"size": len(data)}, data

    def op_reset(self, header: Header, body: bytes) -> tuple[Any, ...]:
        self.sweep(keep=set())
        os.waitpid(self.kernel.pid, 0)
        self.replace_kernel()
        return {}, NOTHING

    def leave(self) -> NoReturn:
        """The host has gone: take everything along, and without a namespace the folder too."""
        self.sweep(keep=set())
        if not self.namespaced and os.path.basename(self.root).startswith("pace-agent-"):
            import shutil

            shutil.rmtree(self.root, ignore_errors=True)
        os._exit(0)

    # -- what a call goes through

    def watch(
        self, call: Call, pid: int, reports: int | None, far_ends: tuple[int, ...] = ()
    ) -> tuple[int | None, Header]:
        """Serve a call until its process ended (its wait status) or, for the kernel, reported (None and the report)."""
        for fd in far_ends:
            os.close(fd)
        poll = select.poll()
        for fd in (call.out, call.err):
            os.set_blocking(fd, False)
        for fd in (self.host, self.wake, call.out, call.err):
            poll.register(fd, select.POLLIN)
        if reports is not None:
            poll.register(reports, select.POLLIN)
        if call.given >= 0:
            os.set_blocking(call.given, False)
            poll.register(call.given, select.POLLOUT)
        while not call.killed:
            for fd, _ in poll.poll(self.next_check(call)):
                if fd == self.host:
                    self.heed(call)
                elif fd == reports:
                    report = receive_report(fd)
                    if report is None:
                        poll.unregister(fd)
                    elif report.get("op") == "began":
                        call.began = True
                        if call.interrupted:
                            call.interrupt()
                    else:
                        call.drain()
                        return None, report
                elif fd == self.wake:
                    os.read(fd, 4096)
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        return status, {}
                elif fd == call.given:
                    if not call.feed():
                        poll.unregister(fd)
                        call.close_given()
                elif call.read(fd) == 0:
                    poll.unregister(fd)
        return os.waitpid(pid, 0)[1], {}

    def next_check(self, call: Call) -> int | None:
        """Milliseconds until something is due because of a flood; None where nothing is."""
        if call.flooded_at is None:
            if call.written <= call.flood_limit:
                return None
            call.flooded_at = time.monotonic()
            call.sweep = True
            call.interrupt()
        left = call.flooded_at + GRACE - time.monotonic()
        if left <= 0:
            self.kill(call)
        return max(int(left * 1000), 0) + 1

    def heed(self, call: Call) -> None:
        """A frame from the host while a call is going on."""
        frame = receive(self.host)
        if frame is None:
            self.leave()
        header, _ = frame
        if header["id"] == call.id and header["op"] == "interrupt":
            call.sweep = call.sweep or header["sweep"]
            call.interrupt()
        elif header["id"] == call.id and header["op"] == "kill":
            self.kill(call)

    def kill(self, call: Call) -> None:
        """End the call's process and all else that was started; the kernel only if it is what runs."""
        if not call.killed:
            call.killed = True
            self.sweep(keep=set() if call.group == self.kernel.pid else {self.kernel.pid})

    # -- processes

    def replace_kernel(self) -> None:
        self.kernel.close()
        self.kernel = Kernel(self.host, self.root)

    def sweep(self, keep: set[int]) -> None:
        """Kill every process but `keep`; give up the whole sandbox if some won't go.

        All are stopped before any is killed, so that none can start another meanwhile.
        """

        def targets() -> set[int]:
            return (processes_here() if self.namespaced else processes_below(os.getpid())) - keep

        stopped: set[int] = set()
        for _ in range(100):
            fresh = targets() - stopped
            if not fresh:
                break
            for pid in fresh:
                signal_quietly(pid, signal.SIGSTOP)
            stopped |= fresh
        give_up = time.monotonic() + 2
        while left := targets():
            for pid in left:
                signal_quietly(pid, signal.SIGKILL)
            if time.monotonic() > give_up:
                os._exit(71)
            time.sleep(0.001)

    # -- files

    def open_below(self, path: str, flags: int, make_folders: bool = False) -> int:
        """A regular file below the root, reached without following a link."""
        prefix = "/box/"
        if path.startswith("/") and not path.startswith(prefix):
            raise PermissionError(errno.EACCES, "not below /box")
        parts = [part for part in path.removeprefix(prefix).split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise PermissionError(errno.EACCES, "not below /box")
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                if make_folders:
                    try:
                        os.mkdir(part, dir_fd=folder)
                    except FileExistsError:
                        pass
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            # Not blocking: a named pipe must not hold the supervisor.
            fd = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise PermissionError(errno.EACCES, "not a regular file")
        return fd


def receive_report(link: int) -> Header | None:
    """The header of a kernel's frame; None if it has ended or wrote what is no frame."""
    try:
        frame = receive(link)
    except (ValueError, MemoryError, OSError):
        return None
    return frame[0] if frame is not None and isinstance(frame[0], dict) else None


def signal_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def limit(limits: dict[str, int]) -> None:
    """Set limits on ourselves: all that we start inherits them, and nothing can raise them again."""
    import resource

    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second more for the processor's: at the hard limit it would be SIGKILL, which says less than SIGXCPU.
        ceiling = value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(kind, (value, ceiling))


def become_reaper() -> None:
    """Without a pid namespace: processes whose parents end become our children, so that none gets out of sight."""
    import ctypes

    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:
        raise SystemExit("PR_SET_CHILD_SUBREAPER failed")


def main() -> None:
    host, config = int(sys.argv[1]), json.loads(sys.argv[2])
    if not config["namespaced"]:
        become_reaper()
    elif os.readlink("/proc/self/ns/pid") == config["outside"]:
        # It is about to signal every process that it sees.
        raise SystemExit("refusing to run: this is the host's own process namespace")
    os.set_inheritable(host, False)
    limit(config["limits"])
    Supervisor(host, config).serve()


if __name__ == "__main__":
    main()
