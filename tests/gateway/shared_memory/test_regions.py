"""Registered regions: names, bounds, and what becomes of them while requests use them."""

import gc
from collections.abc import Callable, Iterator

import pytest

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import SharedRegion
from gateway.policy.caller import Caller
from gateway.shared_memory.regions import DISABLED, MAX_REGIONS, RegionKind, SharedMemory
from gateway.shared_memory.system import VIEWED_BYTES
from gateway.tensor import Buffer, Datatype, Tensor
from tests.regions import path_of, shared_object, shrink

SIZE = 2 * VIEWED_BYTES
CONTENT = bytes(range(256)) * (SIZE // 256)
LARGE = SharedRegion("r", VIEWED_BYTES)


@pytest.fixture
def key() -> Iterator[str]:
    with shared_object(CONTENT) as found:
        yield found


@pytest.fixture
def memory(key: str) -> SharedMemory:
    """The whole object is registered as `r`."""
    found = SharedMemory(allowed=True)
    found.register_system("r", key, 0, SIZE)
    return found


def read(memory: SharedMemory, region: SharedRegion) -> Buffer:
    found = memory.read(region, Datatype.UINT8)
    assert not isinstance(found, DeviceMemory)
    return found


def output(data: Buffer) -> Tensor:
    return Tensor("Y", Datatype.UINT8, (len(data),), data)


def refusal(call: Callable[[], object]) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value.code, caught.value.message


# Names.


def test_regions_are_those_of_a_tenant(key: str) -> None:
    shared = SharedMemory(allowed=True)
    first, other = (shared.of(Caller(tenant=tenant)) for tenant in ("a", "b"))
    for memory, offset in ((first, 0), (other, 1)):
        memory.register_system("r", key, offset, 8)
    assert shared.system_status() == []
    for again, offset in (("a", 0), ("b", 1)):
        memory = shared.of(Caller(tenant=again))
        assert [(each.name, each.offset) for each in memory.system_status()] == [("r", offset)]
        assert bytes(read(memory, SharedRegion("r", 4))) == CONTENT[offset : offset + 4]
    other.unregister(RegionKind.SYSTEM)
    assert refusal(lambda: other.locate(SharedRegion("r", 4)))[0] is Code.NOT_FOUND
    assert bytes(read(first, SharedRegion("r", 4))) == CONTENT[:4]


def test_the_regions_of_all_tenants_have_one_limit(key: str) -> None:
    shared = SharedMemory(allowed=True)
    for number in range(MAX_REGIONS):
        shared.of(Caller(tenant=f"t{number % 3}")).register_system(f"r{number}", key, 0, 8)
    last = shared.of(Caller(tenant="new"))
    assert refusal(lambda: last.register_system("r", key, 0, 8))[0] is Code.UNAVAILABLE


def test_regions_have_the_status_they_were_registered_with(memory: SharedMemory, key: str) -> None:
    memory.register_system("s", key, 16, 32)
    assert [
        (each.name, each.key, each.offset, each.byte_size) for each in memory.system_status()
    ] == [("r", key, 0, SIZE), ("s", key, 16, 32)]
    assert [each.name for each in memory.system_status("s")] == ["s"]
    assert memory.cuda_status() == []


def test_a_name_is_registered_once(memory: SharedMemory, key: str) -> None:
    text = "shared memory region 'r' already in manager"
    assert refusal(lambda: memory.register_system("r", key, 0, 8)) == (Code.ALREADY_EXISTS, text)
    assert refusal(lambda: memory.register_cuda("r", bytes(64), 0, 8)) == (
        Code.ALREADY_EXISTS,
        text,
    )


@pytest.mark.parametrize("name", ["a/b", "..", "../../etc/passwd", "nul\0", " ", "ü" * 300])
def test_a_name_is_only_a_name(memory: SharedMemory, key: str, name: str) -> None:
    memory.register_system(name, key, 0, 8)
    assert bytes(read(memory, SharedRegion(name, 8))) == CONTENT[:8]
    memory.unregister(RegionKind.SYSTEM, name)
    assert [each.name for each in memory.system_status()] == ["r"]


def test_a_region_has_a_name(memory: SharedMemory, key: str) -> None:
    assert refusal(lambda: memory.register_system("", key, 0, 8)) == (
        Code.INVALID_ARG,
        "'region name' is necessary to register system shared memory region",
    )


def test_a_status_is_of_a_region_that_exists(memory: SharedMemory) -> None:
    assert refusal(lambda: memory.system_status("x")) == (
        Code.NOT_FOUND,
        "Unable to find system shared memory region: 'x'",
    )
    assert refusal(lambda: memory.cuda_status("x")) == (
        Code.NOT_FOUND,
        "Unable to find cuda shared memory region: 'x'",
    )


def test_a_status_is_of_its_kind(memory: SharedMemory) -> None:
    assert refusal(lambda: memory.cuda_status("r")) == (
        Code.NOT_FOUND,
        "The region named 'r' is registered as system shared memory, not CUDA shared memory",
    )


def test_unregistering_an_unknown_region_is_no_error(memory: SharedMemory) -> None:
    memory.unregister(RegionKind.SYSTEM, "x")
    memory.unregister(RegionKind.CUDA, "r")
    memory.unregister(RegionKind.CUDA)
    assert [each.name for each in memory.system_status()] == ["r"]


def test_all_regions_of_a_kind_are_unregistered_at_once(memory: SharedMemory, key: str) -> None:
    memory.register_system("s", key, 0, 8)
    memory.unregister(RegionKind.SYSTEM)
    assert memory.system_status() == []


def test_the_number_of_regions_is_limited(key: str) -> None:
    memory = SharedMemory(allowed=True)
    for number in range(MAX_REGIONS):
        memory.register_system(f"r{number}", key, 0, 8)
    code, text = refusal(lambda: memory.register_system("more", key, 0, 8))
    assert code is Code.UNAVAILABLE
    assert f"{MAX_REGIONS} regions are registered" in text
    memory.unregister(RegionKind.SYSTEM, "r0")
    memory.register_system("more", key, 0, 8)


def test_clients_register_nothing_unless_the_server_allows_it(key: str) -> None:
    memory = SharedMemory()
    refused = (Code.UNSUPPORTED, DISABLED)
    assert refusal(lambda: memory.register_system("r", key, 0, 8)) == refused
    assert refusal(lambda: memory.register_cuda("r", bytes(64), 0, 8)) == refused
    assert refusal(lambda: memory.unregister(RegionKind.SYSTEM)) == refused
    assert memory.system_status() == []
    assert refusal(lambda: read(memory, SharedRegion("r", 8))) == (
        Code.NOT_FOUND,
        "Unable to find shared memory region: 'r'",
    )


# Parts.


@pytest.mark.parametrize("size", [1, 8, VIEWED_BYTES - 1, VIEWED_BYTES, SIZE - 3])
def test_a_part_is_read_where_it_lies(memory: SharedMemory, size: int) -> None:
    found = read(memory, SharedRegion("r", size, offset=3))
    assert found.readonly
    assert bytes(found) == CONTENT[3 : 3 + size]


def test_offsets_count_from_where_the_region_begins(memory: SharedMemory, key: str) -> None:
    memory.register_system("s", key, 100, VIEWED_BYTES + 10)
    assert bytes(read(memory, SharedRegion("s", 8, offset=2))) == CONTENT[102:110]
    large = read(memory, SharedRegion("s", VIEWED_BYTES, offset=10))
    assert bytes(large) == CONTENT[110 : 110 + VIEWED_BYTES]
    memory.write(SharedRegion("s", 8, offset=2), output(b"\xff" * 8))
    assert path_of(key).read_bytes()[100:112] == CONTENT[100:102] + b"\xff" * 8 + CONTENT[110:112]


def test_a_large_part_is_a_view_of_the_clients_memory(memory: SharedMemory, key: str) -> None:
    view = read(memory, LARGE)
    with path_of(key).open("r+b") as file:
        file.write(b"changed")
    assert bytes(view[:7]) == b"changed"


@pytest.mark.parametrize("offset", [SIZE, SIZE + 1, -1, 2**63 - 1, 2**64])
def test_a_part_begins_inside_its_region(memory: SharedMemory, offset: int) -> None:
    assert refusal(lambda: memory.locate(SharedRegion("r", 1, offset))) == (
        Code.INVALID_ARG,
        "Invalid offset for shared memory region: 'r'",
    )


@pytest.mark.parametrize(
    ("byte_size", "offset"),
    [(SIZE + 1, 0), (2, SIZE - 1), (-1, 0), (2**63 - 1, SIZE - 1), (2**64, 1)],
)
def test_a_part_ends_inside_its_region(memory: SharedMemory, byte_size: int, offset: int) -> None:
    assert refusal(lambda: memory.locate(SharedRegion("r", byte_size, offset))) == (
        Code.INVALID_ARG,
        "Invalid offset + byte size for shared memory region: 'r'",
    )


def test_a_part_of_no_bytes_is_none(memory: SharedMemory) -> None:
    assert bytes(read(memory, SharedRegion("r", 0, 5))) == b""
    memory.write(SharedRegion("r", 0, 5), output(b""))


def test_an_output_may_be_smaller_than_its_part(memory: SharedMemory, key: str) -> None:
    memory.write(SharedRegion("r", 8), output(memoryview(b"ab")))
    assert path_of(key).read_bytes() == b"ab" + CONTENT[2:]


def test_an_output_is_not_larger_than_its_part(memory: SharedMemory, key: str) -> None:
    assert refusal(lambda: memory.write(SharedRegion("r", 2), output(b"abc"))) == (
        Code.INTERNAL,
        "shared memory size specified with the request for output 'Y' (2 bytes) should be at "
        "least 3 bytes to hold the results",
    )
    assert path_of(key).read_bytes() == CONTENT


# Unregistered or cut short while a request uses it.


def test_a_view_outlives_its_region(memory: SharedMemory, key: str) -> None:
    view = read(memory, LARGE)
    memory.unregister(RegionKind.SYSTEM, "r")
    path_of(key).unlink()
    gc.collect()
    assert bytes(view) == CONTENT[:VIEWED_BYTES]


def test_a_located_part_outlives_its_name(memory: SharedMemory, key: str) -> None:
    located = memory.locate(SharedRegion("r", 4))
    memory.unregister(RegionKind.SYSTEM, "r")
    with shared_object(bytes(8)) as other:
        memory.register_system("r", other, 0, 8)
        memory.write(located, output(b"late"))
        assert bytes(read(memory, located)) == b"late"
        assert path_of(other).read_bytes() == bytes(8)
    assert path_of(key).read_bytes()[:4] == b"late"


@pytest.mark.parametrize("size", [64, VIEWED_BYTES])
def test_an_object_that_was_cut_short_is_read_no_more(
    memory: SharedMemory, key: str, size: int
) -> None:
    read(memory, LARGE)
    shrink(key, size - 1)
    code, text = refusal(lambda: read(memory, SharedRegion("r", size)))
    assert code is Code.INVALID_ARG
    assert f"ends at byte {size - 1}, expected at least {size} bytes" in text
    assert bytes(read(memory, SharedRegion("r", 8))) == CONTENT[:8]


def test_an_object_that_was_cut_short_is_not_grown_again(memory: SharedMemory, key: str) -> None:
    shrink(key, 10)
    code, _ = refusal(lambda: memory.write(SharedRegion("r", 64), output(bytes(11))))
    assert code is Code.INVALID_ARG
    assert path_of(key).stat().st_size == 10
