"""GPUs by the CUDA driver, which a test plays."""

import ctypes
from typing import Any

import pytest

from loadtests.gpu_check import gpus


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
        (Driver(0), "tells of none", []),
        (Driver(1, status=3), "CUDA error 3", []),
        (Driver(2), "", ["NVIDIA 10", "NVIDIA 11"]),
    ],
)
def test_cards_or_the_reason_why_there_is_none(
    driver: Driver | None, reason: str, cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "load_driver", lambda: driver)
    assert reason in gpus.why_none()
    assert bool(gpus.why_none()) == bool(reason)
    assert gpus.cards() == cards
