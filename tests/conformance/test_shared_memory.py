"""Shared memory: regions on both wires with the official clients, and tensors in them."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import InferInput, service_pb2

from tests.conformance.clients import Client, connect
from tests.regions import path_of, shared_object, shrink
from tests.rpc import connected, streaming
from tests.serving import WAIT_SECS, Serving, held, serving

FLAGS = ("--allow-client-shm=true",)
SIZE = 65536
VALUES = np.arange(16, dtype=np.float32)
BYTES = VALUES.nbytes
UNKNOWN = "Unable to find shared memory region: 'gone'"
REGION, OFFSET, BYTE_SIZE = (f"shared_memory_{part}" for part in ("region", "offset", "byte_size"))


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


@pytest.fixture
def key(stub: Any) -> Iterator[str]:
    """An object that is registered as `r`; every region is forgotten after the test."""
    with shared_object(bytes(SIZE)) as found:
        register(stub, "r", found)
        yield found
    stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest())


def register(stub: Any, name: str, key: str, offset: int = 0, byte_size: int = SIZE) -> None:
    stub.SystemSharedMemoryRegister(
        service_pb2.SystemSharedMemoryRegisterRequest(
            name=name, key=key, offset=offset, byte_size=byte_size
        ),
        timeout=WAIT_SECS,
    )


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


# Regions.


async def test_the_clients_manage_system_regions(client: Client) -> None:
    with shared_object(bytes(256)) as key:
        await client.call("register_system_shared_memory", "a", key, 128)
        await client.call("register_system_shared_memory", "b", key, 64, offset=192)
        assert await regions(client, "b") == [("b", key, 192, 64)]
        assert await regions(client) == [("a", key, 0, 128), ("b", key, 192, 64)]
        await client.call("unregister_system_shared_memory", "a")
        assert await regions(client) == [("b", key, 192, 64)]
        await client.call("unregister_system_shared_memory")
    assert await regions(client) == []


async def regions(client: Client, name: str = "") -> list[tuple[str, str, int, int]]:
    found = await client.call("get_system_shared_memory_status", name)
    if client.over_http:
        return [(r["name"], r["key"], r["offset"], r["byte_size"]) for r in found]
    assert all(name == r.name for name, r in found.regions.items())
    return sorted((r.name, r.key, r.offset, r.byte_size) for r in found.regions.values())


async def test_a_refused_registration_says_why(client: Client, key: str) -> None:
    call = "register_system_shared_memory"
    assert await client.refusal(call, "r", key, 8) == (
        "400" if client.over_http else "ALREADY_EXISTS",
        "shared memory region 'r' already in manager",
    )
    assert await client.refusal(call, "x", "/sluice_test_absent", 8) == (
        client.code("INTERNAL"),
        "Unable to open shared memory region: '/sluice_test_absent'",
    )
    assert await client.refusal(call, "x", key, SIZE + 1) == (
        client.code("INVALID_ARGUMENT"),
        "failed to register shared memory region 'x': invalid args",
    )
    assert await client.refusal(call, "x", key, 2**64 - 1, offset=2) == (
        client.code("INVALID_ARGUMENT"),
        "failed to register shared memory region 'x': invalid args",
    )


async def test_a_status_names_what_it_did_not_find(client: Client, key: str) -> None:
    assert await client.refusal("get_system_shared_memory_status", "x") == (
        client.code("NOT_FOUND"),
        "Unable to find system shared memory region: 'x'",
    )
    assert await client.refusal("get_cuda_shared_memory_status", "r") == (
        client.code("NOT_FOUND"),
        "The region named 'r' is registered as system shared memory, not CUDA shared memory",
    )


async def test_unregistering_what_is_unknown_is_no_error(client: Client, key: str) -> None:
    await client.call("unregister_system_shared_memory", "x")
    await client.call("unregister_cuda_shared_memory", "r")
    await client.call("unregister_cuda_shared_memory")
    assert [name for name, *_ in await regions(client)] == ["r"]


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
async def test_without_a_gpu_there_is_no_gpu_memory(client: Client) -> None:
    handle = "A" * 86 + "=="
    assert await client.refusal("register_cuda_shared_memory", "c", handle.encode(), 0, 64) == (
        client.code("INVALID_ARGUMENT"),
        "failed to register CUDA shared memory region: 'c', GPUs not supported",
    )
    found = await client.call("get_cuda_shared_memory_status")
    assert (found if client.over_http else list(found.regions)) == []


# The routes, in literal JSON; as Triton 2.51 answered unless said otherwise.


SYSTEM = "/v2/systemsharedmemory"
NO_STRING = "attempt to access JSON non-string as string"
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_MEMBER = "attempt to access non-existing object member '{}'"


def test_a_status_is_compact_json(http: httpx.Client, key: str) -> None:
    answer = http.get(f"{SYSTEM}/region/r/status")
    row = {"name": "r", "key": key, "offset": 0, "byte_size": SIZE}
    assert answer.content == json.dumps([row], separators=(",", ":")).encode()
    assert answer.headers["content-type"] == "application/json"
    assert http.get(f"{SYSTEM}/status").content == answer.content
    assert http.get("/v2/cudasharedmemory/status").content == b"[]"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"byte_size": 8}, 400, "Shared memory register request has no 'key' field"),
        ({"key": "/x"}, 400, "Shared memory register request has no 'byte_size' field"),
        ({"key": 5, "byte_size": 8}, 500, NO_STRING),
        *(({"key": "/x", "byte_size": bad}, 500, NO_UNSIGNED) for bad in (-1, "8", 8.0, 2**64)),
        *(
            ({"key": "/x", "byte_size": 8, "offset": bad}, 500, NO_UNSIGNED)
            for bad in (-1, "8", None, True)
        ),
    ],
)
def test_a_registration_has_a_key_and_a_size(
    http: httpx.Client, body: dict[str, object], status: int, text: str
) -> None:
    answer = http.post(f"{SYSTEM}/region/x/register", json=body)
    assert (answer.status_code, answer.json()) == (status, {"error": text})


def test_a_registration_is_a_json_object(http: httpx.Client) -> None:
    for body, status in ((b"", 500), (b"[1]", 500), (b"{", 500), (b"\xff", 400)):
        answer = http.post(f"{SYSTEM}/region/x/register", content=body)
        assert answer.status_code == status, body
        assert answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"device_id": 0, "byte_size": 8}, 400, "Shared memory register request has no "),
        ({"raw_handle": {"b64": "eA=="}, "byte_size": 8}, 500, NO_MEMBER.format("device_id")),
        ({"raw_handle": {}, "device_id": 0, "byte_size": 8}, 500, NO_MEMBER.format("b64")),
        ({"raw_handle": "eA==", "device_id": 0, "byte_size": 8}, 500, NO_MEMBER.format("b64")),
        (
            {"raw_handle": {"b64": "***"}, "device_id": 0, "byte_size": 8},
            400,
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        ),
    ],
)
def test_a_cuda_registration_has_a_handle(
    http: httpx.Client, body: dict[str, object], status: int, text: str
) -> None:
    answer = http.post("/v2/cudasharedmemory/region/c/register", json=body)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_a_registration_names_its_region(http: httpx.Client, kind: str) -> None:
    answer = http.post(f"/v2/{kind}sharedmemory/register", json={"key": "/x", "byte_size": 8})
    text = f"'region name' is necessary to register {kind} shared memory region"
    assert (answer.status_code, answer.json()) == (400, {"error": text})


def test_a_wrong_method_is_refused(http: httpx.Client) -> None:
    assert http.get(f"{SYSTEM}/region/r/register").status_code == 405
    assert http.post(f"{SYSTEM}/status").status_code == 405


def test_an_empty_body_unregisters(http: httpx.Client, key: str) -> None:
    answer = http.post(f"{SYSTEM}/region/r/unregister")
    assert (answer.status_code, answer.content) == (200, b"")
    assert http.post(f"{SYSTEM}/unregister").status_code == 200
    assert http.get(f"{SYSTEM}/status").content == b"[]"


@pytest.mark.parametrize(
    "evil", ["/../etc/passwd", "/..", "/a/b", "/a\0b", "", "/", "x" * 5000, "\ud800"]
)
def test_a_key_leads_nowhere_but_to_shared_memory(http: httpx.Client, evil: str) -> None:
    body = json.dumps({"key": evil, "byte_size": 1})
    answer = http.post(f"{SYSTEM}/region/x/register", content=body)
    assert answer.status_code == (400 if evil == "\ud800" else 500)  # no text, or no such key
    assert http.get(f"{SYSTEM}/status").content == b"[]"


@pytest.mark.parametrize(
    ("name", "status"), [("%2e%2e", 200), ("%00", 200), ("a.b", 200), ("%20", 200), ("a%2Fb", 404)]
)
def test_an_odd_name_is_a_name_or_no_route(
    http: httpx.Client, key: str, name: str, status: int
) -> None:
    body = {"key": key, "byte_size": 8}
    assert http.post(f"{SYSTEM}/region/{name}/register", json=body).status_code == status
    assert http.get(f"{SYSTEM}/region/{name}/status").status_code == status


# Tensors.


async def test_tensors_go_there_and_back_in_shared_memory(client: Client) -> None:
    wire = tritonclient.http if client.over_http else tritonclient.grpc
    given = np.array([[1, -2], [3, 4]], np.int32)
    with region("both", 64) as handle:
        await client.call("register_system_shared_memory", "both", "/sluice_test_both", 64)
        shm.set_shared_memory_region(handle, [given[0], given[1]])
        inputs, outputs = [], []
        for number, (name, output) in enumerate(zip("AB", "XY", strict=True)):
            inputs.append(wire.InferInput(name, [2], "INT32"))
            inputs[-1].set_shared_memory("both", 8, offset=8 * number)
            outputs.append(wire.InferRequestedOutput(output))
            outputs[-1].set_shared_memory("both", 8, offset=32 + 8 * number)
        answer = (await client.call("infer", "pair", inputs, outputs=outputs)).get_response()
        assert shapes(client, answer) == [("X", [2]), ("Y", [2])]
        found = shm.get_contents_as_numpy(handle, np.int32, [2, 2], offset=32)
        assert found.tolist() == given.tolist()
        await client.call("unregister_system_shared_memory", "both")


def shapes(client: Client, answer: Any) -> list[tuple[str, list[int]]]:
    """The outputs of a response, which has no data for them."""
    if client.over_http:
        assert all(each.keys() == {"name", "datatype", "shape"} for each in answer["outputs"])
        return [(each["name"], each["shape"]) for each in answer["outputs"]]
    assert list(answer.raw_output_contents) == [b"", b""]
    return [(each.name, list(each.shape)) for each in answer.outputs]


@contextlib.contextmanager
def region(name: str, size: int) -> Iterator[Any]:
    """A region as the official library makes it."""
    handle = shm.create_shared_memory_region(name, f"/sluice_test_{name}", size)
    try:
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_text_in_shared_memory_has_its_lengths(client: Client, key: str) -> None:
    wire = b"\x02\0\0\0hi\0\0\0\0"
    with path_of(key).open("r+b") as file:
        file.write(wire)
    given = InferInput("INPUT", [2], "BYTES")
    given.set_shared_memory("r", len(wire))
    answer = await client.call("infer", "echo_bytes", [given])
    assert answer.as_numpy("OUTPUT").tolist() == [b"hi", b""]


def parameters(**given: int | str) -> dict[str, Any]:
    kinds = {int: "int64_param", str: "string_param"}
    return {
        key: service_pb2.InferParameter(**{kinds[type(value)]: value})
        for key, value in given.items()
    }


def ask(
    given: dict[str, Any] | None = None, wanted: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """A request for echo_fp32, whose input and output have these parameters."""
    request = service_pb2.ModelInferRequest(model_name="echo_fp32", **fields)
    request.inputs.add(name="INPUT", datatype="FP32", shape=[16], parameters=given)
    if wanted is not None:
        request.outputs.add(name="OUTPUT", parameters=wanted)
    if given is None:
        request.raw_input_contents.append(VALUES.tobytes())
    return request


def placed(name: str = "r", byte_size: int = BYTES, offset: int = 0) -> dict[str, Any]:
    return parameters(**{REGION: name, BYTE_SIZE: byte_size, OFFSET: offset})


INVALID_PART = "Invalid offset + byte size for shared memory region: 'r'"
INVALID_OFFSET = "Invalid offset for shared memory region: 'r'"


@pytest.mark.parametrize(
    ("part", "code", "text"),
    [
        (placed("gone"), "NOT_FOUND", UNKNOWN),
        (placed(byte_size=SIZE + 1), "INVALID_ARGUMENT", INVALID_PART),
        (placed(offset=SIZE - 8), "INVALID_ARGUMENT", INVALID_PART),
        (placed(offset=SIZE), "INVALID_ARGUMENT", INVALID_OFFSET),
        (placed(offset=-1), "INVALID_ARGUMENT", INVALID_OFFSET),
        (placed(byte_size=-1), "INVALID_ARGUMENT", INVALID_PART),
        (placed(byte_size=2**63 - 1, offset=8), "INVALID_ARGUMENT", INVALID_PART),
    ],
)
def test_a_part_lies_inside_a_region(
    stub: Any, key: str, part: dict[str, Any], code: str, text: str
) -> None:
    assert refusal(lambda: stub.ModelInfer(ask(part), timeout=WAIT_SECS)) == (code, text)
    output = ask(None, part)
    assert refusal(lambda: stub.ModelInfer(output, timeout=WAIT_SECS)) == (code, text)


def test_an_input_has_the_size_of_its_shape(stub: Any, key: str) -> None:
    request = ask(placed(byte_size=BYTES + 4), id="7")
    assert refusal(lambda: stub.ModelInfer(request, timeout=WAIT_SECS)) == (
        "INVALID_ARGUMENT",
        "[request id: 7] input byte size mismatch for input 'INPUT' for model 'echo_fp32'. "
        "Expected 64, got 68",
    )


def test_an_output_has_room(stub: Any, key: str) -> None:
    request = ask(None, placed(byte_size=BYTES - 1))
    assert refusal(lambda: stub.ModelInfer(request, timeout=WAIT_SECS)) == (
        "INTERNAL",
        "shared memory size specified with the request for output 'OUTPUT' (63 bytes) should be "
        "at least 64 bytes to hold the results",
    )


def test_a_stream_takes_and_gives_shared_memory(stub: Any, key: str) -> None:
    with path_of(key).open("r+b") as file:
        file.write(VALUES.tobytes())
    with streaming(stub) as rpc:
        rpc.ask(ask(placed(), placed(offset=1024), id="a"), ask(placed("gone"), id="b"))
        first, second = rpc.rest()
    assert first.infer_response.id == "a"
    assert list(first.infer_response.raw_output_contents) == [b""]
    assert (second.infer_response.id, second.error_message) == ("b", UNKNOWN)
    assert path_of(key).read_bytes()[1024 : 1024 + BYTES] == VALUES.tobytes()


def test_an_unregistered_region_serves_the_request_that_uses_it(
    server: Serving, repository: Path, stub: Any, key: str
) -> None:
    with path_of(key).open("r+b") as file:
        file.write(b"\x02\0\0\0hi")
    request = service_pb2.ModelInferRequest(model_name="holding")
    request.inputs.add(name="INPUT", datatype="BYTES", shape=[1], parameters=placed(byte_size=6))
    request.outputs.add(name="OUTPUT", parameters=placed(byte_size=6, offset=1024))
    with streaming(stub) as rpc:
        with held(repository, "holding"):
            rpc.ask(request, ask(placed("gone"), id="behind"))
            server.wait_metric("gateway_requests_in_flight", "holding", 1)
            forget = service_pb2.SystemSharedMemoryUnregisterRequest(name="r")
            stub.SystemSharedMemoryUnregister(forget, timeout=WAIT_SECS)
            register(stub, "r", key, offset=4096, byte_size=8)
        answer = rpc.answer()
    assert (answer.error_message, list(answer.infer_response.raw_output_contents)) == ("", [b""])
    content = path_of(key).read_bytes()
    assert content[1024:1030] == b"\x02\0\0\0hi"
    assert not any(content[4096:])


def test_an_object_that_was_cut_short_does_no_harm(stub: Any, key: str) -> None:
    large = service_pb2.ModelInferRequest(model_name="echo_uint8")
    large.inputs.add(
        name="INPUT", datatype="UINT8", shape=[SIZE], parameters=placed(byte_size=SIZE)
    )
    assert stub.ModelInfer(large, timeout=WAIT_SECS).raw_output_contents == [bytes(SIZE)]
    shrink(key, 10)
    for request in (large, ask(placed()), ask(None, placed())):
        code, text = refusal(lambda request=request: stub.ModelInfer(request, timeout=WAIT_SECS))
        assert code == "INVALID_ARGUMENT"
        assert "has lost its memory" in text
    assert stub.ModelInfer(ask(), timeout=WAIT_SECS).raw_output_contents == [VALUES.tobytes()]


@pytest.mark.parametrize("wire", ["http", "grpc"])
async def test_a_server_that_allows_none_says_how_to(server_without: Serving, wire: str) -> None:
    async with connect(server_without, wire) as client:
        refused = (
            client.code("UNIMPLEMENTED"),
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
            "enable.",
        )
        assert await client.refusal("register_system_shared_memory", "r", "/x", 8) == refused
        assert await client.refusal("unregister_system_shared_memory", "r") == refused
        assert await client.refusal("unregister_cuda_shared_memory") == refused
        assert await regions(client) == []


def test_a_tensor_in_memory_that_is_not_allowed_is_not_found(server_without: Serving) -> None:
    with connected(server_without.grpc) as stub:
        request = ask(placed("gone"))
        found = refusal(lambda: stub.ModelInfer(request, timeout=WAIT_SECS))
    assert found == ("NOT_FOUND", UNKNOWN)


@pytest.fixture(scope="module")
def server_without(repository: Any, environment: dict[str, str]) -> Iterator[Serving]:
    """A server without the flag."""
    with serving(repository, environment=environment) as started:
        yield started


def test_inputs_outside_shared_memory_take_the_raw_contents(stub: Any, key: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="pair")
    request.inputs.add(name="A", datatype="INT32", shape=[2], parameters=placed(byte_size=8))
    request.inputs.add(name="B", datatype="INT32", shape=[2])
    request.raw_input_contents.append(np.array([7, 8], np.int32).tobytes())
    answer = stub.ModelInfer(request, timeout=WAIT_SECS)
    found = [np.frombuffer(each, np.int32).tolist() for each in answer.raw_output_contents]
    assert found == [[0, 0], [7, 8]]
