"""The image: one that was given, or one of this machine's Python, built from its files without any registry."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pace_agent.errors import SandboxError
from pace_agent.sandbox.docker.daemon import reason, told

if TYPE_CHECKING:
    from docker import DockerClient

NAME = "pace-agent-sandbox"
RECIPE = 2
"""Raised whenever the contents of the built image change."""
PACKAGES = ("numpy", "sympy", "mpmath")
"""Distributions that go into the built image, those that are installed here."""
PROGRAMS = """
sh bash env cat ls cp mv rm mkdir rmdir ln chmod touch echo printf test true false sleep head tail wc sort uniq cut tr
tee grep sed awk find xargs diff ps kill timeout seq date id whoami uname pwd which basename dirname realpath readlink
mkfifo stat du df dd od md5sum sha256sum tar gzip nproc setsid
""".split()  # noqa: SIM905 - a list of forty strings is harder to read
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3", "pydoc_data"}
"""Folders of the standard library that nobody misses in a sandbox."""


def ready(client: "DockerClient", image: str | None) -> str:
    """A name that the daemon knows: `image`, pulled if it isn't there, or the built one. SandboxError if neither."""
    import docker

    if image is None:
        return build(client)
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.APIError as error:
            raise SandboxError(
                f"image {image} is neither on this machine nor to be pulled: {reason(error)}. Build or load it first, "
                "or give no image: then one is built from this machine's Python"
            ) from error
    return image


def build(client: "DockerClient") -> str:
    """The image of this machine's Python, made the first time. Returns its name, which tells what is in it."""
    import docker

    name = f"{NAME}:{_fingerprint()}"
    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        repository, tag = name.split(":")
        with tempfile.TemporaryDirectory(prefix="pace-agent-") as folder:
            archive = Path(folder, "image.tar")
            write(archive)
            told(lambda: client.api.import_image_from_file(str(archive), repository=repository, tag=tag))
    return name


def _fingerprint() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in _installed()]
    about = f"{RECIPE} {sys.version} {_library()} {_site()} {versions} {os.uname().machine}"
    return f"{sys.version_info.major}.{sys.version_info.minor}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"


def _installed() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def write(archive: Path) -> None:
    """The whole file system of the image, as a tar file."""
    entries = dict(_contents())
    entries |= {path: Path(path) for path in _libraries(entries.values())}
    with tarfile.open(archive, "w") as tar:
        for folder, mode in (("box", 0o755), ("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755)):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, mode))
        for link in ("bin", "sbin", "lib", "lib64"):
            tar.addfile(_entry(link, tarfile.SYMTYPE, 0o777, target=f"usr/{link}"))
        for name, text in (
            ("etc/passwd", "sandbox:x:1000:1000:sandbox:/box:/bin/sh\n"),
            ("etc/group", "sandbox:x:1000:\n"),
        ):
            data = text.encode()
            tar.addfile(_entry(name, tarfile.REGTYPE, 0o644, size=len(data)), io.BytesIO(data))
        python = _python()
        tar.addfile(_entry("usr/bin/python3", tarfile.SYMTYPE, 0o777, target=str(python)))
        done: set[str] = set()
        for target, source in sorted(entries.items()):
            inside = _merged(target)
            if inside in done or inside == "usr/bin/python3":
                continue
            done.add(inside)
            with source.open("rb") as handle:
                state = os.fstat(handle.fileno())
                mode = 0o755 if state.st_mode & 0o100 else 0o644
                tar.addfile(_entry(inside, tarfile.REGTYPE, mode, size=state.st_size), handle)


def _entry(name: str, kind: bytes, mode: int, *, target: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, size
    return entry


def _merged(path: str) -> str:
    """Where a file stands in a file system whose /bin, /sbin, /lib and /lib64 are links into /usr."""
    path = path.lstrip("/")
    return f"usr/{path}" if path.split("/")[0] in ("bin", "sbin", "lib", "lib64") else path


def _python() -> Path:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(os.path.realpath(Path(sys.base_prefix, "bin", name)))


def _library() -> Path:
    """The standard library, where the interpreter looks for it: beside itself, behind all links."""
    return Path(os.path.realpath(os.__file__)).parent


@lru_cache
def _site() -> str:
    """Where the interpreter looks for packages first; Debian's has a place of its own."""
    asking = [str(_python()), "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    return subprocess.run(asking, capture_output=True, text=True, env={}, check=True).stdout.strip()


def _contents() -> Iterator[tuple[str, Path]]:
    """(path in the image, file here) of all but the shared libraries."""
    yield str(_python()), _python()
    for program in PROGRAMS:
        found = shutil.which(program)
        if found is not None:
            yield f"/usr/bin/{program}", Path(os.path.realpath(found))
    library = _library()
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        for name in files:
            if not name.startswith("_tkinter."):  # it would bring the libraries of a screen
                yield str(Path(folder, name)), Path(folder, name)
    for path, source in _packages():
        yield str(Path(_site()) / path), source


def _packages() -> Iterator[tuple[str, Path]]:
    """(path below site-packages, file here)."""
    for name in _installed():
        for file in metadata.files(name) or ():
            source = Path(os.path.normpath(str(file.locate())))
            if ".." not in file.parts and not LEFT_OUT.intersection(file.parts) and source.is_file():
                yield str(file), source


def _libraries(files: Iterable[Path]) -> set[str]:
    """Every shared library that these files load, by the path at which the loader of this machine finds it."""
    binaries = [str(path) for path in files if _is_binary(path)]
    asked = subprocess.run(["ldd", *binaries], capture_output=True, text=True, env={"PATH": os.defpath}, check=False)
    found = set(re.findall(r"^\t(?:.* => )?(/\S+) \(0x", asked.stdout, re.MULTILINE))
    if not found:
        raise SandboxError(f"ldd finds no library of {_python()}: {asked.stderr.strip()}. Give an image instead.")
    # What a package brings along is in the image beside it, where it looks for it.
    brought = {str(source) for _, source in _packages()}
    return {path for path in map(os.path.normpath, found) if path not in brought}


def _is_binary(path: Path) -> bool:
    if path.suffix in (".py", ".pyc", ".pyi", ".txt"):
        return False
    with path.open("rb") as handle:
        return handle.read(4) == b"\x7fELF"
