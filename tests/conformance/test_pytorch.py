"""PyTorch models by the official clients: a repository made for Triton loads and serves."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

from tests import torch_models as models
from tests.conformance.clients import Client
from tests.serving import ROOT, Serving

ADD_SUB = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [
  { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 16 ] },
  { name: "INPUT__1" data_type: TYPE_FP32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 16 ] },
  { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 16 ] }
]
instance_group { kind: KIND_CPU count: 2 }
parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }
"""
RAISING = """
platform: "pytorch_libtorch"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
SHOUTING = """
backend: "pytorch"
input { name: "texts" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "shouted" data_type: TYPE_STRING dims: [ -1 ] }
"""
FLAGS = ("--exit-on-error=false", "--strict-readiness=false")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of TorchScript and torch.export, and some that cannot load."""
    folder = tmp_path_factory.mktemp("pytorch")
    models.script(models.AddSub(), file(folder, "add_sub", "model.pt", ADD_SUB))
    models.export_add_sub(file(folder, "exported", "model.pt2", ""))
    models.script(models.Raising(), file(folder, "raising", "model.pt", RAISING))
    models.script(models.Shouting(), file(folder, "shouting", "model.pt", SHOUTING))
    models.script(models.Echo(), file(folder, "untold", "model.pt", ""))
    examples = (torch.zeros(1, 16), torch.zeros(1, 16))
    traced = models.trace(models.AddSub(), file(folder, "drafted", "net.pt", ""), *examples)
    draft = [sys.executable, "-m", "gateway", "config", str(traced), "--write", "--force"]
    subprocess.run(draft, check=True, timeout=50, cwd=ROOT)
    file(folder, "corrupt", "model.pt", RAISING).write_bytes(b"PK" + bytes(500))
    torch.save({"weight": torch.zeros(1)}, file(folder, "pickled", "model.pt", RAISING))
    file(folder, "missing", "other.pt", RAISING)
    return folder


def file(repository: Path, model: str, name: str, config: str) -> Path:
    """The place of the model's file; its folder and its config are there."""
    (repository / model / "1").mkdir(parents=True)
    (repository / model / "config.pbtxt").write_text(config)
    return repository / model / "1" / name


def tensor(client: Client, name: str, datatype: str, values: Any) -> Any:
    library = tritonclient.http if client.over_http else tritonclient.grpc
    found = library.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values)
    return found


def pair(client: Client, names: tuple[str, str], rows: int = 2) -> tuple[Any, Any, list[Any]]:
    x = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    y = np.full((rows, 16), 2, dtype=np.float32)
    return x, y, [tensor(client, n, "FP32", v) for n, v in zip(names, (x, y), strict=True)]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("add_sub", ("INPUT__0", "INPUT__1")),
        ("exported", ("INPUT0", "INPUT1")),
        ("drafted", ("INPUT0", "INPUT1")),
    ],
)
async def test_sums_and_differences(client: Client, model: str, names: tuple[str, str]) -> None:
    x, y, inputs = pair(client, names)
    answer = await client.call("infer", model, inputs)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT__0"), x + y)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT__1"), x - y)


async def test_an_exported_program_needs_no_configuration(client: Client) -> None:
    found = await client.config("exported")
    assert found.platform == "torch_aoti"
    assert found.max_batch_size == 4
    assert [(each.name, list(each.dims)) for each in found.input] == [
        ("INPUT0", [16]),
        ("INPUT1", [16]),
    ]


async def test_text_goes_in_and_out(client: Client) -> None:
    texts = np.array([b"a", "b€".encode()], dtype=np.object_)
    answer = await client.call("infer", "shouting", [tensor(client, "texts", "BYTES", texts)])
    assert list(answer.as_numpy("shouted")) == [b"A", "B€".encode()]


async def test_a_model_that_raises_returns_the_reason_and_serves_the_next_request(
    client: Client,
) -> None:
    good, bad = np.array([-1], dtype=np.float32), np.array([1], dtype=np.float32)
    code, text = await client.refusal("infer", "raising", [tensor(client, "x", "FP32", bad)])
    assert code == client.code("INTERNAL")
    assert text.endswith("PyTorch execute failure: the input is positive")
    answer = await client.call("infer", "raising", [tensor(client, "x", "FP32", good)])
    assert list(answer.as_numpy("y")) == [-1]


@pytest.mark.parametrize("client", ["grpc.aio"], indirect=True)
async def test_many_requests_at_once_get_their_own_answers(client: Client) -> None:
    async def ask(rows: int) -> bool:
        x, y, inputs = pair(client, ("INPUT__0", "INPUT__1"), rows)
        answer = await client.call("infer", "add_sub", inputs)
        return np.array_equal(answer.as_numpy("OUTPUT__0"), x + y)

    assert all(await asyncio.gather(*(ask(1 + number % 8) for number in range(200))))


def test_what_cannot_load_says_why_in_the_log(server: Serving) -> None:
    for text in (
        "'model.pt' is no archive of PyTorch, or cut short",
        "'model.pt' holds a pickle of torch.save",
        "unable to find '1/model.pt' for model instance 'missing'",
        "model configuration must contain at least one input, none were specified.",
    ):
        assert any(text in line for line in server.every_line)
