"""POSIX shared memory that can be opened, and the cost of holding it."""

import gc
import os

import pytest

from gateway.errors import Code, InferenceError
from gateway.shared_memory.system import open_system
from tests.regions import path_of, shared_object


def refusal(key: str, offset: int = 0, byte_size: int = 8) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        open_system("r", key, offset, byte_size)
    return caught.value.code, caught.value.message


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("form", ["{}", "/{}", "//{}"])
def test_leading_slashes_of_a_key_mean_nothing(form: str) -> None:
    with shared_object(b"12345678") as key:
        found = open_system("r", form.format(key.lstrip("/")), 0, 8)
        assert bytes(found.read(0, 8)) == b"12345678"


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "///", ".", "/..", "/../etc/passwd", "/../../etc/passwd", "a/b", "/a/../b"),
        *("/a\0b", "/sluice_test_absent", "/\ud800", "x" * 5000, "/a/"),
    ],
)
def test_a_key_is_the_name_of_an_object_that_exists(key: str) -> None:
    before = set(os.listdir("/dev/shm"))
    shown = key.replace("\ud800", "?")
    assert refusal(key) == (Code.INTERNAL, f"Unable to open shared memory region: '{shown}'")
    assert set(os.listdir("/dev/shm")) <= before


def test_a_key_with_a_nul_is_not_cut_there() -> None:
    with shared_object(bytes(8)) as key:
        code, _ = refusal(f"{key}\0x")
    assert code is Code.INTERNAL


@pytest.mark.parametrize("prefix", ["triton_python_backend_shm_region_", "sluice-", "psm_", "sem."])
@pytest.mark.parametrize("slashes", ["", "//"])
def test_memory_between_processes_of_servers_is_not_for_clients(prefix: str, slashes: str) -> None:
    key = f"{slashes}{prefix}1"
    assert refusal(key) == (
        Code.INVALID_ARG,
        f"cannot register shared memory region 'r' with key '{key}' as the key contains the "
        f"reserved prefix '{prefix}'",
    )


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, 9), (8, 1), (1, 8), (9, 0), (0, 0), (2**64 - 1, 2), (2, 2**64 - 1), (2**63, 2**63)],
)
def test_a_region_lies_inside_its_object(offset: int, byte_size: int) -> None:
    before = open_files()
    with shared_object(bytes(8)) as key:
        assert refusal(key, offset, byte_size) == (
            Code.INVALID_ARG,
            "failed to register shared memory region 'r': invalid args",
        )
    assert open_files() == before


def test_a_link_is_not_followed() -> None:
    with shared_object(bytes(8)) as key:
        link = path_of(key + "_link")
        link.symlink_to("/etc/passwd")
        try:
            code, _ = refusal(key + "_link")
        finally:
            link.unlink()
    assert code is Code.INTERNAL


def test_a_pipe_and_a_folder_are_no_memory() -> None:
    with shared_object(bytes(8)) as key:
        pipe, folder = path_of(key + "_pipe"), path_of(key + "_folder")
        os.mkfifo(pipe)
        folder.mkdir()
        try:
            assert refusal(key + "_pipe")[0] is Code.INTERNAL
            assert refusal(key + "_folder")[0] is Code.INTERNAL
        finally:
            pipe.unlink()
            folder.rmdir()


def test_a_region_is_forgotten_with_its_last_view() -> None:
    before = open_files()
    with shared_object(bytes(2**20)) as key:
        region = open_system("r", key, 0, 2**20)
        view = region.read(0, 2**20)
        assert open_files() > before
        del region
        assert bytes(view[:1]) == b"\0"
        del view
    assert open_files() == before
