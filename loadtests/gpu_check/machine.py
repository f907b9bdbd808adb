"""The machine under check: its GPUs, and Sluice as an installed package."""

import ctypes
import importlib.metadata
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.cuda_driver import CudaFailed, call, gpu_count, load_driver

LONGEST_NAME = 256


def why_none() -> str:
    """Why nothing can be run on CUDA here; "" if there is a GPU."""
    driver = load_driver()
    if driver is None:
        return "no GPU: the CUDA driver (libcuda.so.1) is not there, or finds no card"
    try:
        return "" if gpu_count(driver) else "no GPU: the CUDA driver tells of none"
    except CudaFailed as error:
        return f"no GPU: {error}"


def cards() -> Sequence[str]:
    """What each GPU is called."""
    if why_none():
        return []
    driver = load_driver()
    return [_name(driver, index) for index in range(gpu_count(driver))]


def _name(driver: Any, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(LONGEST_NAME)
    call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call(driver, "cuDeviceGetName", name, ctypes.c_int(LONGEST_NAME), device)
    return name.value.decode(errors="replace")


ROOT = Path(__file__).parents[2]
NAME = "sluice"


def is_installed() -> bool:
    """Whether there is one already."""
    try:
        importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_distribution(folder: Path, project: Path = ROOT / "pyproject.toml") -> None:
    """Write a folder that, on Python's path, declares the entry points of this source."""
    found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": found.get("scripts", {}), **found["entry-points"]}
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(map(_section, groups, groups.values())))


def _section(group: str, points: Mapping[str, str]) -> str:
    lines = (f"{name} = {value}" for name, value in points.items())
    return "\n".join((f"[{group}]", *lines, ""))
