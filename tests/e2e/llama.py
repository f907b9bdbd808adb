"""Models of the real engines for tests: repositories, requests, and how answers are read."""

import json
import shutil
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx
import pytest

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from tests.conformance.models import with_parameters
from tests.leaving import Question
from tests.one_layer import write_one_layer_gguf
from tests.routed import AnyRouter
from tests.rpc import infer_request
from tests.serving import ROOT, Serving

SHIPPED = ROOT / "model_repository" / "llama"
ANSWER_SECS = 30.0
"""The time that an answer of a few tokens may take while others use the CPU, too."""

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"max_tokens": 32, "temperature": 0}
FRANCE = {"messages": QUESTION, **GREEDY}
"""A request whose answer is known."""
DTYPE = "float32"
"""Of vLLM's shared server: bfloat16 would round by the requests that are computed together."""
IN_FLOAT32 = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32"}
"""Of OpenVINO GenAI, which by default rounds its cache, and on some CPUs activations, to 8 bits."""

every_engine = pytest.mark.parametrize("server", ["vllm", "openvino_genai"], indirect=True)
"""A test of any engine of LLMs."""

ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
"""The fields of a request that takes minutes."""


def write_llama(
    repository: Path, arguments: Mapping[str, Any] = MappingProxyType({}), **parameters: Any
) -> None:
    """Copy the model that a fresh checkout serves, with other arguments and parameters."""
    shutil.copytree(SHIPPED, repository / "llama")
    model_json = repository / "llama" / "1" / "model.json"
    model_json.write_text(json.dumps({**shipped_arguments(), **arguments}))
    for name in ("config.pbtxt", "configs/laptop.pbtxt"):
        with (repository / "llama" / name).open("a") as config:
            config.write(with_parameters(parameters))


def write_laptop(repository: Path, gguf: Path, **settings: Any) -> None:
    """Have the engine for laptops serve the model of one layer, with these settings.

    `gguf` is the stored file. Answers do not depend on the CPU.
    """
    folder = repository / "llama" / "1"
    write_one_layer_gguf(folder / "one-layer.gguf", gguf, stored_folder() / "tokenizer.json")
    found = json.loads((folder / "laptop.json").read_text())
    found |= {"model": "one-layer.gguf", "properties": IN_FLOAT32, **settings}
    (folder / "laptop.json").write_text(json.dumps(found))


def stored_folder() -> Path:
    """The folder of the model; without it the test is skipped."""
    model = str(shipped_arguments()["model"])
    folder = default_root(ENVIRONMENT) / model
    if not (folder / "config.json").is_file():
        pytest.skip(f"the model is not stored: run `sluice fetch {model}`")
    return folder


def stored_gguf() -> Path:
    """The model for laptops; without it, or without its engine, the test is skipped."""
    if find_spec("openvino_genai") is None:
        pytest.skip("openvino-genai is not installed")
    stored = json.loads((SHIPPED / "1" / "laptop.json").read_text())["model"]
    file = default_root(ENVIRONMENT) / stored / "model.gguf"
    if not file.is_file():
        pytest.skip(f"the model is not stored: run `sluice fetch {stored}`")
    return file


def shipped_arguments() -> dict[str, Any]:
    """The arguments of the engine in a fresh checkout."""
    found: dict[str, Any] = json.loads((SHIPPED / "1" / "model.json").read_text())
    return found


class Llama:
    """The model `llama` of one server, asked over HTTP."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self._client = httpx.Client(
            base_url=f"{server.http}/v2/models/llama",
            timeout=ANSWER_SECS,
            transport=AnyRouter(server),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def post(self, path: str, members: Any) -> httpx.Response:
        """The answer to this JSON, with any status."""
        return self._client.post(path, json=members)

    def generate(self, **members: Any) -> dict[str, Any]:
        """The answer of `generate`."""
        answer = self.post("/generate", members)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, **members: Any) -> list[dict[str, Any]]:
        """The events of `generate_stream`."""
        answer = self.post("/generate_stream", {**members, "stream": True})
        assert answer.status_code == 200, answer.text
        return events(answer.text)

    def expect_answer(self) -> None:
        """Ask the good request, which must have its usual answer."""
        assert self.generate(**FRANCE)["text_output"] == ANSWER

    def serves_on(self) -> None:
        """The model answers the next request: one token shows it."""
        assert self.generate(**{**FRANCE, "max_tokens": 1})["text_output"] == "The"


def error_of(answer: httpx.Response) -> Any:
    """The body of a refusal; of a stream that the model refuses it is an event."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        (event,) = events(answer.text)
        return event
    return answer.json()


def streamed(text: str, **sampling: Any) -> Question:
    """A request for a stream, on either wire."""
    body = {"text_input": text, "stream": True, "parameters": sampling}
    message = infer_request("llama", text_input=text, sampling_parameters=json.dumps(sampling))
    message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(
        True
    )
    return Question(body, message)


def long_text() -> str:
    """A prompt that keeps the engine busy for seconds; no part of it is cached."""
    return f"{uuid.uuid4()}: " + "the cat walks home " * 1000


def events(body: str) -> list[dict[str, Any]]:
    """The data of every server-sent event; comments are skipped."""
    lines = (block for block in body.split("\n\n") if block and not block.startswith(":"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(found: list[dict[str, Any]]) -> str:
    """The text of a stream of one sequence."""
    return "".join(event["text_output"] for event in found)
