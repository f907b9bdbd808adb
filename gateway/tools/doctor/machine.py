"""Cores, memory, shared memory and open files: is there enough of them?"""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from gateway import cpus
from gateway.cpus import processors
from gateway.tools.doctor.finding import Finding, Verdict, size

MEMINFO = Path("/proc/meminfo")
SHARED = Path("/dev/shm")
KIB, GIB = 1 << 10, 1 << 30
LITTLE_MEMORY = 2 * GIB
"""The LLM that comes with Sluice takes about this much."""
LITTLE_SHARED = GIB
"""Containers have 64 MiB unless they are told otherwise; NCCL alone may take more."""
FEW_FILES = 4096
"""Every connection is an open file, and a model takes 1024 requests at once; engines have some."""


def findings() -> Iterator[Finding]:
    """Everything of this machine and this process's share of it."""
    yield cores(processors(), cpus.quota())
    if MEMINFO.exists():
        yield memory(*_memory(MEMINFO), cpus.memory_bytes())
    yield shared_memory(SHARED)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def cores(count: int, limit: float | None) -> Finding:
    """The cores that this process may run on, and the time on them that it is given."""
    if limit is None or limit >= count:
        return Finding("cores", f"{count}")
    return Finding(
        "cores",
        f"{count}, of which the cgroup gives the time of {limit:g}",
        Verdict.WARNING,
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
        return Finding("memory", text, Verdict.WARNING, f"{fix}the container's limit")
    return Finding("memory", text)


def shared_memory(folder: Path) -> Finding:
    """Where clients' regions and engines of several processes have their shared memory."""
    what = f"shared memory, {folder}"
    more = "docker run --shm-size=8g, or in Kubernetes an emptyDir of medium Memory there"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        text = f"not there ({error.strerror}): no shared memory regions, no engine on several GPUs"
        return Finding(what, text, Verdict.CANNOT, f"mount a tmpfs there; {more}")
    text = f"{size(usage.free)} of {size(usage.total)} free"
    if usage.free < LITTLE_SHARED:
        return Finding(what, text, Verdict.WARNING, f"remove what is left there, or {more}")
    if not os.access(folder, os.W_OK):
        return Finding(what, f"{text}, not writable", Verdict.CANNOT, f"chmod 1777 {folder}")
    return Finding(what, text)


def open_files(soft: int, hard: int) -> Finding:
    """How many files, and so connections, a process may have open."""
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "any number")
    text = f"{soft:,} (ulimit -n)"
    if soft >= FEW_FILES:
        return Finding("open files", text)
    higher = "" if hard == resource.RLIM_INFINITY or hard >= FEW_FILES else " (as root)"
    fix = f"each connection takes one: ulimit -n {FEW_FILES * 16}{higher}, in systemd "
    fix += "LimitNOFILE=, in docker --ulimit nofile="
    return Finding("open files", text, Verdict.WARNING, fix)


def _memory(meminfo: Path) -> tuple[int, int]:
    lines = (line.split() for line in meminfo.read_text().splitlines())
    kib = {name.removesuffix(":"): int(amount) for name, amount, *_ in lines}
    return kib["MemTotal"] * KIB, kib["MemAvailable"] * KIB
