"""GPUs in use by a played driver, and the placement of models."""

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway import server as server_module
from gateway.cuda_driver import MAJOR, MINOR, CudaFailed, memory_in_use, usable_gpus
from gateway.errors import InferenceError
from gateway.in_process.server import Server
from gateway.models import instance_groups
from tests.conformance.models import identity
from tests.serving import write_model

OUT_OF_ORDER = 999


class Driver:
    """The driver of a machine whose GPUs have these compute capabilities."""

    def __init__(self, *capabilities: tuple[int, int], status: int = 0) -> None:
        self.capabilities = capabilities
        self.status = status
        self.used = 0
        self.retained = self.pushed = 0

    def cuDeviceGetCount(self, count: Any) -> int:
        put(count, len(self.capabilities))
        return self.status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        put(device, 100 + number)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        put(value, self.capabilities[device - 100][(MAJOR, MINOR).index(attribute)])
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.pushed += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.pushed -= 1
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        put(free, 1000 - self.used)
        put(total, 1000)
        return self.status


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


def test_a_failing_driver_is_logged(caplog: pytest.LogCaptureFixture) -> None:
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
    monkeypatch.setattr(server_module, "load_driver", lambda: driver)
    write_model(tmp_path, "m", identity("FP32") + group)
    with Server(model_repository=tmp_path) as server:
        [found] = server.model("m").config()["instance_group"]
    assert (found["kind"], found["gpus"]) == (kind, gpus)


@pytest.mark.parametrize("used", [0, 250, 1000])
def test_the_memory_in_use_is_a_fraction(used: int) -> None:
    driver = Driver((9, 0))
    driver.used = used
    assert memory_in_use(driver, 0) == used / 1000
    assert (driver.retained, driver.pushed) == (0, 0)


def test_memory_that_cannot_be_read_leaves_nothing_behind() -> None:
    driver = Driver((9, 0), status=OUT_OF_ORDER)
    with pytest.raises(CudaFailed, match="cuMemGetInfo_v2"):
        memory_in_use(driver, 0)
    assert (driver.retained, driver.pushed) == (0, 0)
    with pytest.raises(CudaFailed, match="no CUDA driver"):
        memory_in_use(None, 0)


def test_no_model_is_loaded_on_a_gpu_that_is_fuller_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver((9, 0), (9, 0))
    for module in (server_module, instance_groups):
        monkeypatch.setattr(module, "load_driver", lambda: driver)
    for gpu in (0, 1):
        write_model(tmp_path, f"m{gpu}", identity("FP32") + f"instance_group {{ gpus: {gpu} }}")
    limited = {"model_repository": tmp_path, "model_load_gpu_limit": ["0:0.5"]}
    driver.used = 500
    with Server(**limited) as server:
        assert server.ready()
    driver.used = 501
    with Server(**limited, exit_on_error=False) as server:
        assert server.model("m1").ready()
    with pytest.raises(InferenceError) as caught, Server(**limited):
        pass
    assert (
        "can not create model 'm0': memory limit set for GPU 0 has exceeded, model loading is "
        "rejected. (50% is in use, the limit is 50%)"
    ) in caught.value.message
    assert "'m1'" not in caught.value.message
