"""Answers of a server of a Triton repository, byte for byte, and their recording.

    python -m tests.conformance.plain_answers CHECKOUT

has the server of a checkout of another revision answer, and records that in `RECORDED`. There
`changed` has the answers that differ today on purpose, each with its `why`, and is kept.
"""

import base64
import http.client
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import grpc

from gateway import __version__
from gateway.protos import grpc_service_pb2 as pb
from tests.conformance.models import DECOUPLED, EVERY_VERSION, LABELLED, PAIR, REPEAT, identity
from tests.serving import WAIT_SECS, Serving, running, wait_until, write_model

RECORDED = Path(__file__).with_name("data") / "plain_answers.json"
FLAGS = (
    *("--model-control-mode=explicit", "--load-model=*"),
    *("--exit-on-error=false", "--strict-readiness=false"),
)
ENSEMBLE = """platform: "ensemble"
input { name: "A" data_type: TYPE_FP32 dims: [-1] }
output { name: "B" data_type: TYPE_FP32 dims: [-1] }
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "INPUT" value: "A" } output_map { key: "OUTPUT" value: "middle" } },
  { model_name: "versioned" model_version: 1
    input_map { key: "INPUT" value: "middle" } output_map { key: "OUTPUT" value: "B" } }
] }
"""
MODELS = {
    "echo": identity("FP32"),
    "text": identity("BYTES", "1") + "max_batch_size: 4\n",
    "pair": PAIR,
    "labelled": LABELLED,
    "failing": identity("BYTES", "1", fail="the model says no"),
    "broken": identity("FP32", load_fails="no weights"),
    "repeat": REPEAT,
    "chain": ENSEMBLE,
    "stream": identity("BYTES", "1", responses=2) + DECOUPLED,
}
NUMBERS = re.compile(rb"(?<=[:\[,])\d+(?=[,\]}])")
"""Numbers of statistics, whose places are compared."""

Answer = Mapping[str, Any]


class Question(NamedTuple):
    """A request over HTTP. Of its answer the numbers are not compared if they `vary`."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    vary: bool = False


def tensor(datatype: str, shape: Sequence[int], data: Any, name: str = "INPUT") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def infer(path: str, *inputs: dict[str, Any], **members: Any) -> Question:
    body = json.dumps({"inputs": inputs, **members}).encode()
    return Question("POST", f"/v2/models/{path}/infer", body)


def binary_infer() -> Question:
    """Binary inputs and outputs."""
    side = {
        "name": "INPUT",
        "shape": [2],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 8},
    }
    members = {"id": "7", "inputs": [side], "parameters": {"binary_data_output": True}}
    head = json.dumps(members).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return Question("POST", "/v2/models/echo/infer", head + struct.pack("<2f", 1.5, -2), length)


def post(path: str, body: bytes = b"{}") -> Question:
    return Question("POST", path, body)


FP32 = tensor("FP32", [2], [1.5, -2])
A, B = (tensor("INT32", [2], [1, 2], name) for name in "AB")
ONE_TEXT = tensor("BYTES", [1], ["x"])
CLASSES = [{"name": "OUTPUT", "parameters": {"classification": 2}}]
REPOSITORY = "/v2/repository"
QUESTIONS: Mapping[str, Question] = {
    "live": Question("GET", "/v2/health/live"),
    "ready": Question("GET", "/v2/health/ready"),
    "server": Question("GET", "/v2"),
    **{f"metadata of {name}": Question("GET", f"/v2/models/{name}") for name in MODELS},
    **{f"config of {name}": Question("GET", f"/v2/models/{name}/config") for name in MODELS},
    **{f"ready: {name}": Question("GET", f"/v2/models/{name}/ready") for name in MODELS},
    "metadata of a version": Question("GET", "/v2/models/versioned/versions/1"),
    "metadata of versions": Question("GET", "/v2/models/versioned"),
    "config of a version": Question("GET", "/v2/models/versioned/versions/3/config"),
    "ready: a version": Question("GET", "/v2/models/versioned/versions/1/ready"),
    "ready: no version": Question("GET", "/v2/models/versioned/versions/2/ready"),
    "metadata of no version": Question("GET", "/v2/models/versioned/versions/2"),
    "metadata of no number": Question("GET", "/v2/models/versioned/versions/x"),
    "metadata of no model": Question("GET", "/v2/models/none"),
    "no path": Question("GET", "/v2/none"),
    "no method": Question("DELETE", "/v2/models/echo"),
    "infer": infer("echo", FP32, id="1"),
    "infer of a version": infer("versioned/versions/1", FP32),
    "infer of the newest version": infer("versioned", FP32),
    "infer in binary": binary_infer(),
    "infer of a batch": infer("text", tensor("BYTES", [2, 1], ["x", "y"])),
    "infer of two tensors": infer("pair", A, B),
    "infer of one output": infer("pair", A, B, outputs=[{"name": "Y"}]),
    "infer of classes": infer("labelled", tensor("FP32", [3], [0, 2, 1]), outputs=CLASSES),
    "infer of an ensemble": infer("chain", tensor("FP32", [2], [1, 2], "A")),
    "infer that fails": infer("failing", ONE_TEXT),
    "infer of no model": infer("none", FP32),
    "infer of no version": infer("versioned/versions/2", FP32),
    "infer of a model that is not loaded": infer("broken", FP32),
    "infer of a wrong datatype": infer("echo", tensor("INT32", [1], [1])),
    "infer of a wrong shape": infer("pair", tensor("INT32", [3], [1, 2, 3], "A"), B),
    "infer of too little data": infer("echo", tensor("FP32", [3], [1])),
    "infer without an input": infer("pair", A),
    "infer of no input": infer("echo", tensor("FP32", [1], [1], "NONE")),
    "infer of no output": infer("echo", FP32, outputs=[{"name": "NONE"}]),
    "infer of no JSON": post("/v2/models/echo/infer", b"{"),
    "infer without a body": post("/v2/models/echo/infer", b""),
    "infer of a decoupled model": infer("stream", ONE_TEXT),
    "generate": post("/v2/models/repeat/generate", b'{"text_input":"a","n":1}'),
    "generate_stream": post("/v2/models/repeat/generate_stream", b'{"text_input":"a","n":3}'),
    "generate that fails": post("/v2/models/failing/generate", b'{"INPUT":"a"}'),
    "index": post(f"{REPOSITORY}/index"),
    "index of ready models": post(f"{REPOSITORY}/index", b'{"ready":true}'),
    "load of no model": post(f"{REPOSITORY}/models/none/load"),
    "load that fails": post(f"{REPOSITORY}/models/broken/load"),
    "load": post(f"{REPOSITORY}/models/echo/load"),
    "unload": post(f"{REPOSITORY}/models/labelled/unload"),
    "unload of no model": post(f"{REPOSITORY}/models/none/unload"),
    "index after an unload": post(f"{REPOSITORY}/index"),
    "infer after an unload": infer("labelled", tensor("FP32", [3], [0, 2, 1])),
    "statistics of a model": Question("GET", "/v2/models/echo/stats", vary=True),
    "statistics of a version": Question("GET", "/v2/models/versioned/versions/3/stats", vary=True),
    "statistics": Question("GET", "/v2/models/stats", vary=True),
    "statistics of no model": Question("GET", "/v2/models/none/stats"),
    "trace settings": Question("GET", "/v2/trace/setting"),
    "log settings": Question("GET", "/v2/logging"),
    "shared memory": Question("GET", "/v2/systemsharedmemory/status"),
    "shared memory of no region": Question("GET", "/v2/systemsharedmemory/region/none/status"),
}


def write_models(repository: Path) -> None:
    """Write a repository as Triton has it: no file that only this server knows."""
    for name, config in MODELS.items():
        write_model(repository, name, config)
    write_model(repository, "versioned", identity("FP32") + EVERY_VERSION, versions=(1, 3))
    (repository / "labelled" / "labels.txt").write_text("zero\none\ntwo\n")


def answers_of(server: Serving) -> Iterator[tuple[str, Answer]]:
    """The answer to each question, over HTTP and then over gRPC."""
    for name, question in QUESTIONS.items():
        if "index" in name:
            wait_until(lambda: "UNLOADING" not in index_of(server), "what is unloaded has ended")
        yield name, over_http(server, question)
    with grpc.insecure_channel(server.grpc) as channel:
        for name, (method, message) in messages().items():
            yield f"{name} over gRPC", over_grpc(channel, method, message)


def index_of(server: Serving) -> str:
    return str(over_http(server, QUESTIONS["index"])["body"])


def over_http(server: Serving, question: Question) -> Answer:
    """Status, headers but the date, in order, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=WAIT_SECS)
    try:
        connection.request(question.method, question.path, question.body, question.headers)
        with connection.getresponse() as found:
            body = found.read().replace(b'"%s"' % __version__.encode(), b'"VERSION"')
            headers = [f"{name}: {value}" for name, value in found.getheaders()]
    finally:
        connection.close()
    if question.vary:
        body = NUMBERS.sub(b"N", body)
    varies = ("date: ", *(("content-length: ",) if question.vary else ()))
    kept = [each for each in headers if not each.lower().startswith(varies)]
    return {"status": found.status, "headers": kept, "body": shown(body)}


def shown(content: bytes) -> str:
    """The content as JSON can have it: text, or base64 of what is no text."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"base64: {base64.b64encode(content).decode()}"


def messages() -> Mapping[str, tuple[str, Any]]:
    """Methods of Triton's service with their messages."""
    asked = pb.ModelInferRequest(
        model_name="echo", id="1", raw_input_contents=[struct.pack("<f", 1)]
    )
    asked.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    wrong = pb.ModelInferRequest(model_name="echo", raw_input_contents=[b"123"])
    wrong.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    missing = pb.ModelInferRequest(model_name="none")
    return {
        "live": ("ServerLive", pb.ServerLiveRequest()),
        "ready": ("ServerReady", pb.ServerReadyRequest()),
        "model ready": ("ModelReady", pb.ModelReadyRequest(name="echo")),
        "metadata": ("ModelMetadata", pb.ModelMetadataRequest(name="versioned")),
        "metadata of no model": ("ModelMetadata", pb.ModelMetadataRequest(name="none")),
        "config": ("ModelConfig", pb.ModelConfigRequest(name="pair")),
        "index": ("RepositoryIndex", pb.RepositoryIndexRequest()),
        "infer": ("ModelInfer", asked),
        "infer of too little data": ("ModelInfer", wrong),
        "infer of no model": ("ModelInfer", missing),
        "load of no model": (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(model_name="none"),
        ),
        "unload": ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="text")),
    }


def over_grpc(channel: grpc.Channel, method: str, message: Any) -> Answer:
    """Status, its text, and the bytes of the message."""
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    try:
        content = call(message.SerializeToString(deterministic=True), timeout=WAIT_SECS)
    except grpc.RpcError as error:
        return {"status": error.code().name, "details": error.details()}
    return {"status": "OK", "message": base64.b64encode(content).decode()}


def record(checkout: Path) -> None:
    """Record the answers of the server of a checkout."""
    with TemporaryDirectory() as folder:
        write_models(Path(folder))
        server = Serving(Path(folder), FLAGS, start=partial(start, checkout))
        with running(server):
            answers = dict(answers_of(server))
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    revision = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    changed = json.loads(RECORDED.read_text())["changed"]
    found = {"revision": revision, "answers": answers, "changed": changed}
    RECORDED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def start(
    checkout: Path, args: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start `python -m gateway` of a checkout."""
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=checkout,
        env={**os.environ, **environment, "PYTHONPATH": str(checkout)},
    )


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
