"""Limits of control groups, of both versions, as the kernel writes them."""

from pathlib import Path

import pytest

from gateway import process_limits

MOUNT = "sys/fs/cgroup"


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/cgroup": own, **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_the_second_version_counts_what_the_group_is_in(tmp_path: Path) -> None:
    files = {
        f"{MOUNT}/pod/memory.max": "4294967296",
        f"{MOUNT}/pod/a/memory.max": "max",
        f"{MOUNT}/pod/a/cpu.max": "150000 100000",
    }
    root = tree(tmp_path, "0::/pod/a", files)
    assert process_limits.memory_bytes(root) == 4 << 30
    assert process_limits.quota(root) == 1.5


def test_the_first_version_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {
        f"{MOUNT}/memory/box/memory.limit_in_bytes": "1073741824",
        f"{MOUNT}/cpu/box/cpu.cfs_quota_us": "50000",
        f"{MOUNT}/cpu/box/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, "4:memory:/box\n2:cpu,cpuacct:/box\n0::/", files)
    assert process_limits.memory_bytes(root) == 1 << 30
    assert process_limits.quota(root) == 0.5


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {f"{MOUNT}/memory.max": "1048576", f"{MOUNT}/cpu.max": "max 100000"}
    root = tree(tmp_path, "0::/../../elsewhere", files)
    assert process_limits.memory_bytes(root) == 1 << 20
    assert process_limits.quota(root) is None


@pytest.mark.parametrize("quota", ["-1", ""])
def test_no_quota_is_no_limit(tmp_path: Path, quota: str) -> None:
    files = {f"{MOUNT}/cpu/cpu.cfs_quota_us": quota, f"{MOUNT}/cpu/cpu.cfs_period_us": "100000"}
    assert process_limits.quota(tree(tmp_path, "1:cpu:/", files)) is None


def test_a_system_without_them_has_no_limits(tmp_path: Path) -> None:
    assert process_limits.memory_bytes(tmp_path) is None
    assert process_limits.quota(tmp_path) is None
