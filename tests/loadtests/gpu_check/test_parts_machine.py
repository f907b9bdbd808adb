"""GPUs by a fake CUDA driver, and the entry points of a source that is not installed."""

import ctypes
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from loadtests.gpu_check import parts
from loadtests.gpu_check.parts import ROOT, write_distribution


class Driver:
    """A driver with some cards; `status` is what every call returns."""

    def __init__(self, cards: int, status: int = 0) -> None:
        self._cards = cards
        self._status = status

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int)).contents.value = self._cards
        return self._status

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int)).contents.value = index.value + 10
        return self._status

    def cuDeviceGetName(self, name: Any, length: Any, device: Any) -> int:
        name.value = f"NVIDIA {device.value}".encode()
        return self._status


@pytest.mark.parametrize(
    ("driver", "reason", "cards"),
    [
        (None, "is not there", []),
        (Driver(0), "reports none", []),
        (Driver(1, status=3), "CUDA error 3", []),
        (Driver(2), "", ["NVIDIA 10", "NVIDIA 11"]),
    ],
)
def test_cards_or_the_reason_why_there_is_none(
    driver: Driver | None, reason: str, cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "load_driver", lambda: driver)
    assert reason in parts.why_none()
    assert bool(parts.why_none()) == bool(reason)
    assert parts.cards() == cards


def test_the_entry_points_are_those_of_the_project(tmp_path: Path) -> None:
    write_distribution(tmp_path / "site")
    (found,) = distributions(path=[str(tmp_path / "site")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        assert {each.name: each.value for each in found.entry_points.select(group=group)} == points
    assert found.name == "sluice"
