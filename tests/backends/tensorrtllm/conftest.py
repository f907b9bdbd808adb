"""A server whose workers find the stand-in, and what its engines were asked for."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ROOT, WAIT_SECS, Serving, serving, wait_until, write_model

STAND_IN = Path(__file__).parent / "stand_in"
BACKEND = 'backend: "tensorrtllm"\n'
CLASSIC = (
    BACKEND
    + """
max_batch_size: 8
model_transaction_policy { decoupled: false }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
input { name: "prompt_vocab_size" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
"""
)
READERS = """
parameters { key: "reasoning_parser" value { string_value: "deepseek-r1" } }
parameters { key: "tool_call_parser" value { string_value: "qwen3" } }
"""
OLD_NAME = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: -1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
ensemble_scheduling { step {
  model_name: "llm" model_version: -1
  input_map { key: "text_input" value: "text_input" }
  input_map { key: "max_tokens" value: "max_tokens" }
  input_map { key: "stream" value: "stream" }
  output_map { key: "text_output" value: "text_output" }
} }
"""


@dataclass(frozen=True)
class Engine:
    """Events of the engines, in their order."""

    log: Path

    def events(self, key: str) -> list[Mapping[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for line in lines if key in (event := json.loads(line))]

    def asked(self, text: str) -> Mapping[str, Any]:
        """The latest request with that prompt."""
        return [event for event in self.events("asked") if event["asked"] == text][-1]

    def wait_ended(self, text: str) -> Mapping[str, Any]:
        """Wait until the engine has nothing more to do for that prompt."""
        wait_until(lambda: bool(self._ended(text)), f"the engine has ended {text!r}")
        return self._ended(text)[-1]

    def _ended(self, text: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events("ended") if event["ended"] == text]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "llm", BACKEND)
    (folder / "llm/1/model.yaml").write_text(
        "model: m\nmax_seq_len: 100\nkv_cache_config: {free_gpu_memory_fraction: 0.5}\n"
        "enable_lora: true\ntriton_config: {cancellation_check_period_ms: 20}\n"
    )
    (folder / "llm/1/multi_lora.json").write_text('{"pirate": "adapters/pirate"}')
    write_model(folder, "reader", BACKEND + READERS)
    (folder / "reader/1/model.json").write_text('{"model": "m"}')
    write_model(folder, "bad_parser", BACKEND + READERS.replace("qwen3", "qwen33"))
    (folder / "bad_parser/1/model.json").write_text('{"model": "m"}')
    write_model(folder, "classic", CLASSIC)
    (folder / "classic/1/model.json").write_text('{"model": "m"}')
    write_model(folder, "ensemble", OLD_NAME)
    write_model(folder, "mortal", BACKEND)
    (folder / "mortal/1/model.json").write_text('{"model": "m", "enable_iter_perf_stats": false}')
    write_model(folder, "bad_argument", BACKEND)
    (folder / "bad_argument/1/model.yaml").write_text("model: m\nkv_cache_confg: {}\n")
    write_model(folder, "bad_empty", BACKEND)
    write_model(folder, "bad_count", BACKEND + "instance_group { count: 2 kind: KIND_MODEL }")
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine") / "log")


@pytest.fixture(scope="module")
def server(repository: Path, engine: Engine) -> Iterator[Serving]:
    names = ("llm", "classic", "ensemble", "mortal", "reader")
    path = os.pathsep.join([str(STAND_IN), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with serving(
        repository,
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in names),
        environment={"PYTHONPATH": path.rstrip(os.pathsep), "STAND_IN_LOG": str(engine.log)},
    ) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    opened = [event["opened"] for event in engine.events("opened")]
    living = {each["pid"] for each in opened if each["enable_iter_perf_stats"]}
    assert len(living) == 3
    assert living <= {each["shutdown"] for each in engine.events("shutdown")}, started.log[-100:]


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as found:
        yield found


LLM = "/v2/models/llm"


def generate(http: httpx.Client, model: str = "llm", **body: Any) -> dict[str, Any]:
    response = http.post(f"/v2/models/{model}/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http: httpx.Client, model: str = "llm", **body: Any) -> tuple[int, str]:
    response = http.post(f"/v2/models/{model}/generate", json=body)
    return response.status_code, response.json()["error"]


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = http.post(f"{LLM}/generate_stream", json=body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def load_error(http: httpx.Client, model: str) -> str:
    response = http.post(f"/v2/repository/models/{model}/load", json={})
    assert response.status_code == 400, response.text
    return response.json()["error"]
