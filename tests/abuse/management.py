"""Cases of management, logs and shared memory: names, loads, markers, labels, internal regions."""

import json
from collections.abc import Callable
from contextlib import suppress

import grpc
from tritonclient.grpc import service_pb2

from tests.abuse.scene import KEY, PROMPT, Scene
from tests.regions import path_of
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS

CONFIG = json.dumps(
    {
        "backend": "identity",
        "input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [1]}],
    }
)
INVALID = (
    *("..", "../repeat", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", "\x1b[31mred", "repeat "),
    *("e\u0301", "a\u202eb", "repeat\u200b", "x" * 300, "x" * 65_536),
)
"""Names under which no model can be uploaded."""
NAMES = (*INVALID, "r\u0435peat", "REPEAT", "?")
"""Names that are no model's; some look like the name of one."""
EXPECTED = ("NOT_FOUND", "INVALID_ARGUMENT", "INTERNAL", "UNAVAILABLE", "CANCELLED")


def names_of_models(scene: Scene) -> None:
    """Names with paths, controls, look-alikes and 64 KiB, in every RPC that has a name."""
    pb = service_pb2
    with connected(scene.server.grpc) as stub:
        for name in NAMES:
            asked: list[tuple[Callable[..., object], object]] = [
                (stub.ModelInfer, pb.ModelInferRequest(model_name=name)),
                (stub.ModelMetadata, pb.ModelMetadataRequest(name=name)),
                (stub.ModelConfig, pb.ModelConfigRequest(name=name)),
                (stub.ModelStatistics, pb.ModelStatisticsRequest(name=name)),
                (stub.TraceSetting, pb.TraceSettingRequest(model_name=name)),
                (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=name)),
            ]
            for call, message in asked:
                assert _code(scene, call, message) in EXPECTED, (name, message)
            unload = pb.RepositoryModelUnloadRequest(model_name=name)
            stub.RepositoryModelUnload(unload, timeout=WAIT_SECS)
        for name in INVALID:
            upload = pb.RepositoryModelLoadRequest(model_name=name)
            upload.parameters["config"].string_param = CONFIG
            upload.parameters["file:1/x"].bytes_param = b""
            assert _code(scene, stub.RepositoryModelLoad, upload) == "INVALID_ARGUMENT", name
    index = scene.ask("/v2/repository/index", {}).json
    assert not {each["name"] for each in index} & set(NAMES)


def _code(scene: Scene, call: Callable[..., object], message: object) -> str:
    try:
        call(message, timeout=WAIT_SECS)
    except grpc.RpcError as error:
        scene.check(error.details() or "")
        name: str = error.code().name
        return name
    return "OK"


def large_loads(scene: Scene) -> None:
    """Loads with many files, files outside the folder, and a config of many bytes."""
    load = "/v2/repository/models/new/load"
    many = {f"file:1/{number}": "" for number in range(257)}
    for more, text in (
        (many, "expected at most 256 files"),
        ({"file:../../x": ""}, "must stay within model directory"),
        ({"file:1/x": "no base64"}, "is no base64 text"),
        ({"file:" + "a/" * 5000: ""}, "cannot be written"),
    ):
        answer = scene.ask(load, {"parameters": {"config": CONFIG, **more}})
        scene.refused(answer, (400, 500), text)
    message = service_pb2.RepositoryModelLoadRequest(model_name="new")
    message.parameters["config"].string_param = CONFIG + " " * (17 << 20)
    message.parameters["file:1/x"].bytes_param = b""
    with connected(scene.server.grpc) as stub:
        assert _code(scene, stub.RepositoryModelLoad, message) == "INTERNAL"
    assert "expected at most 16777216" in scene.seen[-1]


def markers(scene: Scene) -> None:
    """A key and a prompt in the places of good and bad requests."""
    bearer = f"Authorization: Bearer {KEY}"
    good = {"text_input": PROMPT, "n": 1}
    bodies = (good, {**good, "n": -1}, {**good, "n": "x"}, {"text_input": PROMPT}, [PROMPT])
    for path in ("generate", "generate_stream", "infer"):
        for body in bodies:
            scene.ask(f"/v2/models/repeat/{path}", body, bearer, f"X-Api-Key: {KEY}")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"):
        for model in ("repeat", "talker", "openai"):
            body = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
            scene.ask(path, {**body, "prompt": PROMPT, "input": PROMPT}, bearer)
    metadata = (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY))
    with connected(scene.server.grpc) as stub:
        for number in (1, -1):
            with streaming(stub, metadata) as rpc:
                rpc.ask(infer_request("repeat", text_input=PROMPT, n=number))
                rpc.ask(infer_request("repeat", text_input=PROMPT, other=PROMPT))
                rpc.rest()
        with suppress(grpc.RpcError):
            wrong = infer_request("echo_fp32", INPUT=PROMPT)
            stub.ModelInfer(wrong, metadata=metadata, timeout=WAIT_SECS)
    series = "\n".join(scene.server.metrics())
    assert PROMPT not in series
    assert KEY not in series


def labels_of_clients(scene: Scene) -> None:
    """Names, ids and tenants of clients: the metrics have no more series than before."""
    before = scene.server.metrics().keys()
    for number in range(200):
        name = f"client-{number}"
        scene.ask(f"/v2/models/{name}/infer", {"inputs": []}, f"X-Tenant: {name}")
        scene.ask(
            "/v2/models/repeat/generate",
            {"text_input": "x", "n": 1, "id": name, "sequence_id": number + 1},
            f"X-Gateway-Inference-Fairness-Id: {name}",
        )
    assert scene.server.metrics().keys() == before


OBJECTS = ("psm_abuse", "sem.abuse", "sluice-abuse", "triton_python_backend_shm_region_abuse")


def internal_memory(scene: Scene) -> None:
    """Objects of shared memory with names of server processes, over both wires."""
    for key in OBJECTS:
        path_of(key).write_bytes(bytes(64))
    try:
        with connected(scene.server.grpc) as stub:
            for key in OBJECTS:
                for form in (key, f"/{key}", f"//{key}"):
                    path = "/v2/systemsharedmemory/region/mine/register"
                    body = {"key": form, "offset": 0, "byte_size": 64}
                    scene.refused(scene.ask(path, body), (400,), "reserved prefix")
                    message = service_pb2.SystemSharedMemoryRegisterRequest(
                        name="mine", key=form, byte_size=64
                    )
                    call = stub.SystemSharedMemoryRegister
                    assert _code(scene, call, message) == "INVALID_ARGUMENT"
    finally:
        for key in OBJECTS:
            path_of(key).unlink()
