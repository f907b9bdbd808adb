"""The machine: each limit at the limit and one beyond."""

import resource
from pathlib import Path

import pytest

from gateway.tools.doctor.machine import cores, findings, memory, open_files, shared_memory
from gateway.tools.doctor.report import Health

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(None, Health.OK), (2.0, Health.OK), (1.5, Health.WARNING)],
)
def test_a_quota_below_the_cores_is_a_warning(limit: float | None, verdict: Health) -> None:
    assert cores(2, limit).verdict is verdict


@pytest.mark.parametrize(
    ("available", "limit", "verdict"),
    [
        (2 * GIB, None, Health.OK),
        (2 * GIB - 1, None, Health.WARNING),
        (8 * GIB, 2 * GIB - 1, Health.WARNING),
        (8 * GIB, 1 << 63, Health.OK),
    ],
)
def test_little_memory_is_a_warning(available: int, limit: int | None, verdict: Health) -> None:
    finding = memory(16 * GIB, available, limit)
    assert finding.verdict is verdict
    assert ("cgroup" in finding.found) == (limit == 2 * GIB - 1)


def test_without_shared_memory_regions_cannot_be_registered(tmp_path: Path) -> None:
    finding = shared_memory(tmp_path / "none")
    assert finding.verdict is Health.CANNOT
    assert "--shm-size" in finding.fix


@pytest.mark.parametrize(
    ("soft", "verdict"),
    [
        (4095, Health.WARNING),
        (4096, Health.OK),
        (resource.RLIM_INFINITY, Health.OK),
    ],
)
def test_few_files_are_a_warning(soft: int, verdict: Health) -> None:
    assert open_files(soft, 1 << 20).verdict is verdict


def test_root_is_named_where_the_hard_limit_is_low() -> None:
    assert "as root" in open_files(1024, 2048).fix
    assert "as root" not in open_files(1024, 1 << 20).fix


def test_this_machine_has_all_of_it() -> None:
    assert [each.what.split(",")[0] for each in findings()] == [
        "cores",
        "memory",
        "shared memory",
        "open files",
    ]
