"""What control groups let this process have; both of their versions."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
MOUNT = Path("sys/fs/cgroup")


def memory_bytes(root: Path = ROOT) -> int | None:
    """The least of the limits of memory that hold; None if there is none."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (_text(folder / name) for folder in _folders(root, "memory") for name in names)
    return min((int(text) for text in texts if text.isdigit()), default=None)


def quota(root: Path = ROOT) -> float | None:
    """How much time of how many CPUs it may use; None if there is no limit."""
    shares = (share for folder in _folders(root, "cpu") for share in _shares(folder))
    return min(shares, default=None)


def _shares(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():  # "max" and -1 are no limit
        yield int(quota) / int(period)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The group of this process and those that it is in, as far as they can be seen."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / MOUNT
        elif controller in controllers.split(","):
            mount = root / MOUNT / controller
        else:
            continue
        inner = mount / path.lstrip("/")
        yield from (inner, *(each for each in inner.parents if each.is_relative_to(mount)))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # another version, or not shown to containers
        return ""
