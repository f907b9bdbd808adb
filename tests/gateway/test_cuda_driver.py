"""Which GPUs are used, by a driver that a test plays, and where models then go."""

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway import core
from gateway.cuda_driver import MAJOR, MINOR, usable_gpus
from gateway.in_process.server import Server
from tests.conformance.models import identity
from tests.serving import write_model

OUT_OF_ORDER = 999


class Driver:
    """The driver of a machine whose GPUs have these compute capabilities."""

    def __init__(self, *capabilities: tuple[int, int], status: int = 0) -> None:
        self.capabilities = capabilities
        self.status = status

    def cuDeviceGetCount(self, count: Any) -> int:
        put(count, len(self.capabilities))
        return self.status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        put(device, 100 + number)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        put(value, self.capabilities[device - 100][(MAJOR, MINOR).index(attribute)])
        return 0


def put(reference: Any, value: int) -> None:
    """Write a number where a reference leads, as C does."""
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_int)).contents.value = value


@pytest.mark.parametrize(
    ("driver", "usable"),
    [
        (None, ()),
        (Driver(), ()),
        (Driver((9, 0)), (0,)),
        (Driver((6, 0), (5, 2), (7, 5)), (0, 2)),
    ],
)
def test_a_gpu_is_used_if_it_is_new_enough(driver: Driver | None, usable: tuple[int, ...]) -> None:
    assert usable_gpus(driver, (6, 0)) == usable


def test_a_driver_that_does_not_answer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sluice.gpus"):
        assert usable_gpus(Driver((9, 0), status=OUT_OF_ORDER), (6, 0)) == ()
    [record] = caplog.records
    assert str(OUT_OF_ORDER) in vars(record)["reason"]


@pytest.mark.parametrize(
    ("group", "kind", "gpus"),
    [
        ("", "KIND_GPU", [0, 2]),
        ("instance_group { kind: KIND_AUTO gpus: 2 }", "KIND_GPU", [2]),
        ("instance_group { kind: KIND_CPU }", "KIND_CPU", []),
    ],
)
def test_models_go_where_their_instance_groups_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, kind: str, gpus: list[int]
) -> None:
    driver = Driver((9, 0), (5, 0), (8, 6))
    monkeypatch.setattr(core, "load_driver", lambda: driver)
    write_model(tmp_path, "m", identity("FP32") + group)
    with Server(model_repository=tmp_path) as server:
        [found] = server.model("m").config()["instance_group"]
    assert (found["kind"], found["gpus"]) == (kind, gpus)
