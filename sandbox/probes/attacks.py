"""What code in a sandbox tries, for `pace_agent.sandbox.probes`: pieces of Python that end with one word.

Each prints how the attack failed (mostly the name of an error), or `allowed`. What holds for every one of them, because
they also run where nothing contains them: it changes nothing outside that the runner didn't make for it, undoes what it
did, and stops by itself after a small multiple of the limit that it is up against.
"""

PRELUDE = """
import ctypes, errno, os, platform, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what):
    try:
        what()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except (MemoryError, ValueError) as error:
        return type(error).__name__
    return "allowed"
def system(x86, arm, *arguments):
    number = x86 if platform.machine() in ("x86_64", "amd64") else arm
    back = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if back == -1:
        raise OSError(ctypes.get_errno(), "")
    return back
def in_child(what):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, attempt(what).encode())
        finally:
            os._exit(0)
    os.close(writer)
    word = os.read(reader, 100).decode()
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    return word or signal.Signals(os.WTERMSIG(status)).name
def first(words):
    failed = "none"
    for word in words:
        if word == "allowed":
            return word
        failed = word if failed == "none" else failed
    return failed
"""
"""Before each: `given` holds what the runner made."""

# -- files

READ_FILE = "print(attempt(lambda: open(given['secret']).read()))"

WRITE_FILE = """
def write():
    with open(given["target"], "a") as file:
        file.write("x")
print(attempt(write))
"""

WRITABLE_MOUNTS = """
import stat
memory = {"tmpfs", "proc", "devpts", "mqueue", "sysfs", "cgroup", "cgroup2"}
found = "none"
lines = open("/proc/self/mountinfo").readlines()
mounts = {line.split()[4] for line in lines}
for line in lines:
    left, right = line.split(" - ")
    place = left.split()[4].encode().decode("unicode_escape")
    if right.split()[0] in memory or not os.access(place, os.F_OK) or stat.S_ISCHR(os.stat(place).st_mode):
        continue
    readable = os.path.isdir(place) and os.access(place, os.R_OK | os.X_OK)
    folders = [entry.path for entry in os.scandir(place) if entry.path not in mounts] if readable else []
    if any(os.access(path, os.W_OK) for path in [place, *folders]):
        found = "allowed"
print(found)
"""

KERNEL_SETTINGS = """
own = ("fs/mqueue/", "kernel/msg", "kernel/sem", "kernel/shm", "kernel/auto_msgmni", "kernel/ns_last_pid",
       "kernel/pid_max")
own = tuple("/proc/sys/" + name for name in own)  # these are of a namespace
paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"]
for top in ("/proc/sys", "/proc/irq", "/sys"):
    for folder, _, names in os.walk(top):
        paths += [path for path in (f"{folder}/{name}" for name in names) if not path.startswith(own)]
print(first(attempt(lambda: os.close(os.open(path, os.O_WRONLY))) for path in paths[:20000]))
"""

MAKE_DEVICE = """
def make():
    os.mknod("probe-device", 0o020666, os.makedev(1, 3))
    os.unlink("probe-device")
print(attempt(make))
"""

HOST_DEVICES = """
import stat
usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
devices = [f"/dev/{name}" for name in os.listdir("/dev") if name not in usual]
devices = [path for path in devices if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFBLK, stat.S_IFCHR)]
print(first(attempt(lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))) for path in devices))
"""

# -- network

CONNECT = "print(attempt(lambda: socket.create_connection(('127.0.0.1', given['port']), timeout=2)))"
ABSTRACT = "print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(given['abstract'])))"
UNIX = "print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(given['socket'])))"
ROUTE = "print(attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))))"
"""No packet is sent by this, but it needs a way out."""
VSOCK = "print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))"
NETLINK = "print(attempt(lambda: socket.socket(16, socket.SOCK_RAW)))"
PACKET = "print(first(attempt(lambda: socket.socket(family, socket.SOCK_RAW)) for family in (17, 44)))"
RAW = "print(attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)))"
CRYPTO = "print(attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET)))"

# -- identity

FIRST_ENVIRONMENT = """
import hashlib
def entries():
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        try:
            yield from open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
        except OSError:
            continue
hashes = {hashlib.sha256(entry).hexdigest() for entry in entries()}
print("allowed" if hashes & set(given["environment"]) else "none")
"""

SEE_PROCESSES = """
found = "none"
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if given["token"].encode() in open(f"/proc/{pid}/cmdline", "rb").read():
            found = "allowed"
    except OSError:
        continue
print(found)
"""

KILL = "print(attempt(lambda: os.kill(given['victim'], signal.SIGKILL)))"

DESCRIPTORS = """
kinds = ("/dev/null", "pipe:", "socket:", "anon_inode:", "/proc/", "/memfd:")
found = "none"
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith(kinds):
                found = "allowed"
    except OSError:
        continue
print(found)
"""

CAPABILITIES = """
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
held = [int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
print("allowed" if any(held) else "none")
"""

BECOME_ROOT = "print(in_child(lambda: os.setuid(0)))"

SUID = """
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("none" if fields["NoNewPrivs"].strip() == "1" else "allowed")
"""

RAISE_LIMITS = """
import resource
def raised(kind):
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        return  # nothing bounds it: as good as raised
    resource.setrlimit(kind, (hard, hard + 1))
names = ("NPROC", "AS", "DATA", "FSIZE", "NOFILE", "CPU", "MEMLOCK", "SIGPENDING", "MSGQUEUE", "CORE")
kinds = [getattr(resource, "RLIMIT_" + name, 11) for name in names]  # SIGPENDING has no name there
print(first(in_child(lambda: raised(kind)) for kind in kinds))
"""

HOST_NAME = "print(attempt(lambda: socket.sethostname(socket.gethostname())))"

# -- system calls

PTRACE = """
pid = os.fork()
if pid == 0:
    time.sleep(5)
    os._exit(0)
word = attempt(lambda: system(101, 117, 0x4206, pid, 0, 0))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(word)
"""

READ_MEMORY = """
pid = os.fork()
if pid == 0:
    time.sleep(5)
    os._exit(0)
source, target = ctypes.create_string_buffer(b"x", 8), ctypes.create_string_buffer(8)
one = (ctypes.c_size_t * 2)(ctypes.addressof(target), 8)
other = (ctypes.c_size_t * 2)(ctypes.addressof(source), 8)
word = attempt(lambda: system(310, 270, pid, ctypes.byref(one), 1, ctypes.byref(other), 1, 0))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(word)
"""

AGENT_MEMORY = "print(attempt(lambda: os.close(os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR))))"

AGENT_DESCRIPTORS = """
paths = [f"/proc/{os.getppid()}/fd/{fd}" for fd in range(40)]
words = [attempt(lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))) for path in paths]
words += [attempt(lambda: os.listdir(f"/proc/{os.getppid()}/fd"))]
words += [attempt(lambda: system(438, 438, os.pidfd_open(os.getppid()), 3, 0))]
print(first(words))
"""

IO_URING = "print(attempt(lambda: os.close(system(425, 425, 1, ctypes.create_string_buffer(120)))))"
AIO = """
context = ctypes.c_ulong(0)
def take():
    system(206, 0, 8, ctypes.byref(context))
    system(207, 1, context.value)
print(attempt(take))
"""
INOTIFY = "print(attempt(lambda: os.close(system(294, 26, 0))))"
HUGE_PAGES = "import mmap\nprint(attempt(lambda: mmap.mmap(-1, 2 << 20, flags=0x40022)))"
UNSHARE = """
flags = (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80)
print(first(in_child(lambda: system(272, 97, flag)) for flag in flags))
"""
CLONE = """
def clone():
    pid = system(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print(attempt(clone))
"""
CLONE3 = """
def clone():
    arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    pid = system(435, 435, ctypes.byref(arguments), 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print(attempt(clone))
"""
SETNS = """
print(first(
    in_child(lambda: system(308, 268, os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0))
    for pid in ("1", "self") for kind in ("mnt", "net", "user", "ipc", "uts")
))
"""
MOUNT = """
os.makedirs("probe-mount", exist_ok=True)
def mount():
    if libc.mount(b"none", b"probe-mount", b"tmpfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "")
    libc.umount2(b"probe-mount", 2)
print(attempt(mount))
os.rmdir("probe-mount")
"""
FSOPEN = "print(attempt(lambda: os.close(system(430, 430, b'tmpfs', 0))))"
CHROOT = "print(in_child(lambda: os.chroot('.')))"
MEMFD = "print(attempt(lambda: os.close(system(319, 279, b'probe', 0))))"
SHARED_SEGMENT = """
print(attempt(lambda: system(31, 195, system(29, 194, 0, 4096, 0o1600), 0, None)))
"""
KEYS = "print(attempt(lambda: system(250, 219, 0, -2, 1)))"
BPF = """
attributes = ctypes.create_string_buffer((2).to_bytes(4, "little") + (4).to_bytes(4, "little") * 3, 128)
print(attempt(lambda: os.close(system(321, 280, 0, attributes, 128))))
"""
PERF = """
attributes = ctypes.create_string_buffer((1).to_bytes(4, "little") + (112).to_bytes(4, "little"), 128)
print(attempt(lambda: os.close(system(298, 241, attributes, 0, -1, -1, 0))))
"""
USERFAULTFD = "print(attempt(lambda: os.close(system(323, 282, 1))))"
BY_HANDLE = """
handle = ctypes.create_string_buffer((120).to_bytes(4, "little"), 128)
where = ctypes.c_int()
def reach():
    system(303, 264, -100, b"/usr", handle, ctypes.byref(where), 0)
    os.close(system(304, 265, os.open("/usr", os.O_RDONLY), handle, 0))
print(attempt(reach))
"""
MODULE = "print(attempt(lambda: system(175, 105, 0, 0, 0)))"
"""Whoever may load modules learns here that this is none."""
REBOOT = "print(attempt(lambda: system(169, 142, 0, 0, 0, 0)))"
"""Whoever may restart the machine learns here that this is not how to ask."""
KERNEL_LOG = "print(attempt(lambda: system(103, 116, 10, None, 0)))"
SET_CLOCK = "print(attempt(lambda: system(227, 112, 0, 8)))"
"""Whoever may set the clock learns here that there is no time at this address."""
NEW_CALL = "print(attempt(lambda: system(464, 464, -1, 0, 0, 0, 0, 0)))"
TERMINAL = """
import fcntl, pty
def type_into():
    near, far = os.openpty()
    os.setsid()
    fcntl.ioctl(far, 0x540E, 0)
    fcntl.ioctl(far, 0x5412, b"x")
print(in_child(type_into))
"""
X32 = "print(in_child(lambda: system(0x40000000 | 39, 172)) if platform.machine() == 'x86_64' else 'none')"
INT80 = """
import mmap
def call():
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # getpid by the 32-bit interface
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print(in_child(call) if platform.machine() == "x86_64" else "none")
"""

# -- exhaustion: each knows its limit from `given`, and stops a little beyond

FORKS = """
def fork_all():
    for _ in range(4 * given["processes"]):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
print(attempt(fork_all))
"""
ALLOCATE = "import mmap\nprint(attempt(lambda: mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))"
"""Asked for and not used: nobody misses it where it is granted."""
TREE_MEMORY = """
import mmap
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, given["memory"] // 2)
        for at in range(0, len(held), 4096):
            held[at] = 1
        time.sleep(1)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(4)]
print("killed" if any(statuses) else "allowed")
"""
DISK = """
def fill(folder):
    for number in range(4):
        with open(f"{folder}/probe-{number}", "wb") as file:
            file.write(bytes(given["disk"]))
print(first(attempt(lambda: fill(folder)) for folder in (os.environ["HOME"], "/tmp", "/dev/shm")))
"""
FILES = """
def fill(folder):
    for number in range(4 * given["files"]):
        os.close(os.open(f"{folder}/probe-{number}", os.O_CREAT))
print(first(attempt(lambda: fill(folder)) for folder in (os.environ["HOME"], "/tmp", "/dev/shm")))
"""
DESCRIPTOR_COUNT = "print(attempt(lambda: [os.dup(1) for _ in range(4 * given['descriptors'])]))"
TIMERS = """
def take():
    timer = ctypes.c_int()
    for _ in range(4000):
        system(222, 107, 1, None, ctypes.byref(timer))
print(in_child(take))
"""
LOOP = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
end = time.monotonic() + 20
while time.monotonic() < end:
    pass
print("allowed")
"""
OUTPUT = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
for _ in range(400 * given["captured"] // 65536):
    os.write(1, b"x" * 65536)
time.sleep(5)
print("allowed")
"""

# -- ends

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", given["mark"]])
    os._exit(0)
time.sleep(given["stay"])
print("started")
"""
KILL_AGENT = """
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(0.2)
print("survived")
"""
FORGE = """
import json, struct
def frame(text):
    return struct.pack("!II", len(text), 0) + text
forged = [b'{"failed": "x", "exit_code": "x", "oom": 1}', b"[" * 5000]
for fd in range(3, 64):
    for text in forged:
        attempt(lambda: os.write(fd, frame(text)))
print("wrote")
"""
SWAP = """
import random, shutil, threading
def swap(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.makedirs("swapped", exist_ok=True)
            time.sleep(random.random() / 2000)
            os.rename("swapped", "kept")
            os.symlink(given["folder"], "swapped")
            time.sleep(random.random() / 2000)
            os.unlink("swapped")
            os.rename("kept", "swapped")
        except OSError:  # the host has made a folder in between
            for name in ("swapped", "kept"):
                os.unlink(name) if os.path.islink(name) else shutil.rmtree(name, ignore_errors=True)
threading.Thread(target=swap, args=(given["seconds"],)).start()
print("started")
"""
LEAVE = """
for path in (os.environ["HOME"] + "/left", "/tmp/left", "/dev/shm/left", "/run/left"):
    attempt(lambda: open(path, "w").close())
attempt(lambda: os.chmod("/dev/pts/ptmx", 0o640))
attempt(lambda: os.chmod("/dev/pts", 0o700))
print("left")
"""
FIND = """
paths = (os.environ["HOME"] + "/left", "/tmp/left", "/dev/shm/left", "/run/left")
ptmx = "/dev/pts/ptmx"
changed = os.path.exists(ptmx) and os.stat(ptmx).st_mode & 0o777 == 0o640
print("allowed" if changed or any(map(os.path.exists, paths)) else "none")
"""
