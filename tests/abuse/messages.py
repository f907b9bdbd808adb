"""Cases of messages: deep JSON on every route, classes without number, equal ids on a stream."""

import re
from collections.abc import Mapping

import grpc
import pytest

from gateway.policy.areas import HTTP
from tests.abuse.scene import Scene
from tests.raw import Connection, post
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS

DEPTH = 10_000
FILLED = {"model": "echo_fp32", "version": "1", "region": "r", "repository": "x"}
DEEP = (
    b"[" * DEPTH + b"]" * DEPTH,
    b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
    b'{"inputs":' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    b'{"parameters":' + b'{"a":' * DEPTH + b"1" + b"}" * DEPTH + b"}",
    b'{"model":"echo_fp32","messages":' + b"[" * DEPTH + b"]" * DEPTH + b"}",
)
JSON = "Content-Type: application/json"
WITHOUT_BODY = re.compile(r"/ping|.*/cancel|.*/unregister|.*/(docs|playground).*")
"""Routes that read no body."""


def paths() -> list[str]:
    """A path of every route of the table, but of the metrics."""
    routes = [route for area in HTTP.values() for route in area if route != "/metrics"]
    return [re.sub(r"\{(\w+)[^}]*\}", lambda found: FILLED.get(found[1], "x"), r) for r in routes]


def deep_json(scene: Scene) -> None:
    """JSON that is nested ten thousand times, as the body of every route."""
    for path in paths():
        with Connection(scene.http) as connection:
            for body in DEEP:
                connection.send(post(path, body, JSON))
                answer = scene.answer(connection)
                assert answer.status >= 400 or WITHOUT_BODY.fullmatch(path), (path, answer.status)


LARGE = 4 << 20
REPEATS = 10
NUMBERS = b"1," * (LARGE // 2) + b"1]}]}"
HEAD = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1],"data":['
TEXT = b'"text_input":"' + b"x" * LARGE
REFUSED: Mapping[str, tuple[str, bytes]] = {
    "numbers that end": ("/v2/models/echo_fp32/infer", HEAD + NUMBERS[:-5]),
    "too many numbers": ("/v2/models/echo_fp32/infer", HEAD + NUMBERS),
    "a text that ends": ("/v2/models/repeat/generate", b"{" + TEXT),
    "a text and no number": ("/v2/models/repeat/generate", b'{"n":"x",' + TEXT + b'"}'),
    "a chat that ends": ("/v1/chat/completions", b'{"model":"openai",' + TEXT),
    "a chat without messages": ("/v1/chat/completions", b'{"model":"repeat",' + TEXT + b'"}'),
}


def large_bad_requests(scene: Scene) -> None:
    """Requests of 4 MiB that are refused, over each wire: their bytes are freed at once."""
    for name, (path, body) in REFUSED.items():
        for _ in range(REPEATS):
            answer = scene.ask(path, body)
            assert answer.status >= 400, name
    typed = infer_request("echo_fp32")
    typed.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    typed.inputs[0].contents.fp32_contents.extend([1.0] * (LARGE // 4))
    unknown = infer_request("unknown")
    unknown.raw_input_contents.append(bytes(LARGE))
    with connected(scene.server.grpc) as stub, streaming(stub) as rpc:
        for message in (typed, unknown):
            for _ in range(REPEATS):
                rpc.ask(message)
                assert scene.check(rpc.answer().error_message)
                with pytest.raises(grpc.RpcError):
                    stub.ModelInfer(message, timeout=WAIT_SECS)


def classes_without_number(scene: Scene) -> None:
    """Far more classes of an output than it has elements."""
    given = {"name": "INPUT", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
    for count in (2**31, 2**63 - 1):
        asked = {"name": "OUTPUT", "parameters": {"classification": count}}
        body = {"inputs": [given], "outputs": [asked]}
        answer = scene.ask("/v2/models/echo_fp32/infer", body)
        assert answer.json["outputs"][0]["shape"] == [2]
    for count in (-1, 2**64, 10**30):
        asked["parameters"] = {"classification": count}
        scene.refused(scene.ask("/v2/models/echo_fp32/infer", body), (400, 500), "classification")


def equal_ids_on_a_stream(scene: Scene) -> None:
    """Requests of one id on one stream, and on another: each has its answers."""
    with connected(scene.server.grpc) as stub, streaming(stub) as one, streaming(stub) as other:
        for rpc in (one, other):
            rpc.ask(*[infer_request("repeat", "same", text_input="x", n=3) for _ in range(50)])
        for rpc in (one, other):
            found = rpc.rest()
            assert len(found) == 150
            assert {each.infer_response.id for each in found} == {"same"}
            assert {each.error_message for each in found} == {""}
