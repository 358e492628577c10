"""The table of `pace_agent.sandbox.probes`: every attack, with the answers that mean that it failed."""

from pace_agent.sandbox.probes import attacks, judging
from pace_agent.sandbox.probes.judging import Group, Probe

SEES_PROCESSES = "see the host's processes"
"""The probe that tells whether there are walls at all."""

_ABSENT = ("ENOENT",)
_READ_ONLY = ("EROFS", "EACCES", "EPERM", "ENOENT")
_MOUNTS, _USER, _PROCESSES, _NET = "mount namespace", "user namespace", "pid namespace", "network namespace"
_FILTER = "seccomp"
_UNPRIVILEGED = "no privileges"


def _file(name: str, code: str, by: str, *refusals: str, judge: judging.Judge = judging.by_word) -> Probe:
    return Probe(name, Group.FILES, code, by, refusals, judge)


def _reach(name: str, code: str, by: str, *refusals: str, judge: judging.Judge = judging.by_word) -> Probe:
    return Probe(name, Group.NETWORK, code, by, refusals, judge)


def _who(name: str, code: str, by: str, *refusals: str, judge: judging.Judge = judging.by_word) -> Probe:
    return Probe(name, Group.IDENTITY, code, by, refusals, judge)


def _call(name: str, code: str, *refusals: str, by: str = _FILTER) -> Probe:
    return Probe(name, Group.CALLS, code, by, refusals or ("EPERM",))


def _use_up(
    name: str, code: str, by: str, *refusals: str, docker: str = "", judge: judging.Judge = judging.by_recovery
) -> Probe:
    return Probe(name, Group.EXHAUSTION, code, by, refusals, judge, docker, shared=False)


def _end(
    name: str, code: str, by: str, *refusals: str, judge: judging.Judge, sessions: bool = True, fresh: bool = True
) -> Probe:
    return Probe(name, Group.ENDS, code, by, refusals, judge, sessions=sessions, fresh=fresh, shared=False)


PROBES: tuple[Probe, ...] = (
    _file("read a host file", attacks.READ_FILE, _MOUNTS, *_ABSENT),
    _file("write a host file", attacks.WRITE_FILE, _MOUNTS, *_ABSENT, judge=judging.by_target),
    _file("find a writable host folder", attacks.WRITABLE_MOUNTS, "read-only mounts", "none"),
    _file("change the kernel's settings", attacks.KERNEL_SETTINGS, "an unprivileged user", *_READ_ONLY),
    _file("make a device", attacks.MAKE_DEVICE, _UNPRIVILEGED, "EPERM", "EACCES"),
    _file("open the host's devices", attacks.HOST_DEVICES, "a /dev of its own", "none", "EACCES", "EPERM"),
    _reach("connect to the host's loopback", attacks.CONNECT, _NET, "ECONNREFUSED", judge=judging.by_listener),
    _reach("connect to an abstract socket", attacks.ABSTRACT, _NET, "ECONNREFUSED", judge=judging.by_listener),
    _reach("connect to a socket by its path", attacks.UNIX, _MOUNTS, *_ABSENT, judge=judging.by_listener),
    _reach("find a way to the internet", attacks.ROUTE, _NET, "ENETUNREACH"),
    _reach("vsock", attacks.VSOCK, _FILTER, "EAFNOSUPPORT"),
    _reach("netlink", attacks.NETLINK, _FILTER, "EAFNOSUPPORT"),
    _reach("packet sockets", attacks.PACKET, _FILTER, "EAFNOSUPPORT"),
    _reach("raw sockets", attacks.RAW, _UNPRIVILEGED, "EPERM"),
    _reach("the kernel's cryptography", attacks.CRYPTO, _FILTER, "EAFNOSUPPORT"),
    _who("find the host's environment", attacks.FIRST_ENVIRONMENT, "an empty environment", "none"),
    _who(SEES_PROCESSES, attacks.SEE_PROCESSES, _PROCESSES, "none"),
    _who("kill a host process", attacks.KILL, _PROCESSES, judge=judging.by_victim),
    _who("use descriptors of the host", attacks.DESCRIPTORS, "closed descriptors", "none"),
    _who("hold capabilities", attacks.CAPABILITIES, _UNPRIVILEGED, "none"),
    _who("become root", attacks.BECOME_ROOT, _UNPRIVILEGED, "EPERM", "EINVAL"),
    _who("gain by set-user-ID programs", attacks.SUID, "no_new_privs", "none"),
    _who("raise limits", attacks.RAISE_LIMITS, "hard limits", "EPERM", "ValueError"),
    _who("change the host's name", attacks.HOST_NAME, _FILTER, "EPERM"),
    _call("ptrace", attacks.PTRACE),
    _call("read another process's memory", attacks.READ_MEMORY),
    _call("write the agent's memory", attacks.AGENT_MEMORY, "EACCES", "EPERM", by="an undumpable agent"),
    _call("use the agent's descriptors", attacks.AGENT_DESCRIPTORS, "EACCES", "EPERM", by="an undumpable agent"),
    _call("io_uring", attacks.IO_URING, "ENOSYS", "EPERM"),
    _call("use up asynchronous I/O", attacks.AIO, "ENOSYS", "EPERM"),
    _call("use up inotify", attacks.INOTIFY, "ENOSYS", "EPERM"),
    _call("take huge pages", attacks.HUGE_PAGES, "ENOMEM"),
    _call("namespaces by unshare", attacks.UNSHARE),
    _call("namespaces by clone", attacks.CLONE),
    _call("namespaces by clone3", attacks.CLONE3, "ENOSYS"),
    _call("enter namespaces", attacks.SETNS, "EPERM", "EACCES"),
    _call("mount", attacks.MOUNT),
    _call("mount by fsopen", attacks.FSOPEN),
    _call("chroot", attacks.CHROOT),
    _call("memfd", attacks.MEMFD, "ENOSYS"),
    _call("System V shared memory", attacks.SHARED_SEGMENT),
    _call("keyrings", attacks.KEYS),
    _call("bpf", attacks.BPF),
    _call("perf events", attacks.PERF),
    _call("userfaultfd", attacks.USERFAULTFD),
    _call("open by file handle", attacks.BY_HANDLE),
    _call("load a kernel module", attacks.MODULE),
    _call("restart the machine", attacks.REBOOT),
    _call("read the kernel's log", attacks.KERNEL_LOG),
    _call("set the clock", attacks.SET_CLOCK),
    _call("calls newer than the filter", attacks.NEW_CALL, "ENOSYS"),
    _call("type into a terminal", attacks.TERMINAL),
    _call("x32 calls", attacks.X32, "SIGSYS", "ENOSYS", "none"),
    _call("32-bit calls by int 0x80", attacks.INT80, "SIGSYS", "SIGSEGV", "none"),
    _use_up("fork without end", attacks.FORKS, "limit of processes", "EAGAIN", docker="pids limit"),
    _use_up("allocate 8 GB", attacks.ALLOCATE, "limit of memory per process", "ENOMEM"),
    _use_up("fill memory with many processes", attacks.TREE_MEMORY, "memory cgroup or watchdog", "killed", "oom",
            docker="memory cgroup"),
    _use_up("fill the disk", attacks.DISK, "sized memory file systems", "ENOSPC", "EFBIG"),
    _use_up("fill the disk with empty files", attacks.FILES, "file systems with a bound on files", "ENOSPC"),
    _use_up("open descriptors without end", attacks.DESCRIPTOR_COUNT, "limit of descriptors", "EMFILE"),
    _use_up("make timers without end", attacks.TIMERS, "limit of pending signals", "EAGAIN"),
    _use_up("run without end", attacks.LOOP, "the host's deadline", judge=judging.by_deadline),
    _use_up("write without end", attacks.OUTPUT, "bounded buffers", "output_limit"),
    _end("leave a daemon", attacks.DAEMON, "pid namespace, killed from outside", judge=judging.by_absence),
    _end("kill the agent", attacks.KILL_AGENT, "typed results", judge=judging.by_result),
    _end("forge an answer", attacks.FORGE, "nothing in an answer is believed", judge=judging.by_result),
    _end("swap a folder for a link", attacks.SWAP, "folders opened one below the other", judge=judging.by_reading,
         fresh=False),
    _end("name a path that leads out", "", "names are checked", judge=judging.by_path, fresh=False),
    _end("leave something for the next execution", attacks.LEAVE, "namespaces and folders of its own", "none",
         judge=judging.by_next, sessions=False),
)  # fmt: skip
