"""Models of every form run, with tensors of any name, and their failures are clear."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.pytorch.backend import PytorchBackend
from backends.pytorch.instance import PytorchInstance
from gateway.config import InstanceGroup, InstanceKind
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests import torch_models as models
from tests.backends.pytorch.conftest import Load
from tests.torch_models import COMPILES, config_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FP32, INT64, STRING = DataType.TYPE_FP32, DataType.TYPE_INT64, DataType.TYPE_STRING
A = np.arange(32, dtype="<f4").reshape(2, 16)
B = np.full((2, 16), 3, dtype="<f4")


def run(instance: PytorchInstance, outputs: str, **inputs: Any) -> list[Any]:
    """Run on float32 arrays, or on tensors, by name; outputs as nested lists."""
    given = {
        name: value if isinstance(value, Tensor) else fp32(name, value)
        for name, value in inputs.items()
    }
    found = instance.run(given, outputs.split(), frozenset())
    assert list(found) == outputs.split()
    return [tensor.array().tolist() for tensor in found.values()]


def fp32(name: str, value: Any) -> Tensor:
    return array_tensor(name, Datatype.FP32, np.asarray(value, dtype="<f4"))


def refused(instance: PytorchInstance, inputs: Mapping[str, Any], outputs: str = "y") -> str:
    with pytest.raises(InferenceError) as caught:
        run(instance, outputs, **inputs)
    assert "/" not in caught.value.message, "a path of the host"
    return caught.value.message


@pytest.fixture
def add_sub(tmp_path: Path) -> Path:
    models.script(models.AddSub(), tmp_path / "script.pt")
    models.trace(models.AddSub(), tmp_path / "trace.pt", torch.ones(1, 16), torch.ones(1, 16))
    models.export_add_sub(tmp_path / "program.pt2")
    return tmp_path


@pytest.mark.parametrize("file", ["script.pt", "trace.pt", "program.pt2"])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("INPUT0 INPUT1", "OUTPUT__0 OUTPUT__1"),
        ("INPUT1 INPUT0", "OUTPUT__1 OUTPUT__0"),
        ("INPUT__1 INPUT__0", "first second"),
        ("minuend subtrahend", "SUM__0 DIFFERENCE__1"),
    ],
)
async def test_tensors_find_their_arguments_by_name_index_or_order(
    file: str, inputs: str, outputs: str, add_sub: Path, load: Load
) -> None:
    config = config_of(
        file, dict.fromkeys(inputs.split(), FP32), dict.fromkeys(outputs.split(), FP32)
    )
    instance = await load(config, add_sub)
    swapped = inputs in ("INPUT1 INPUT0", "INPUT__1 INPUT__0")
    given = dict(zip(inputs.split(), (B, A) if swapped else (A, B), strict=True))
    expected = [(A + B).tolist(), (A - B).tolist()]
    swapped_outputs = outputs == "OUTPUT__1 OUTPUT__0"
    assert run(instance, outputs, **given) == (expected[::-1] if swapped_outputs else expected)


async def test_structured_names_of_exported_programs(add_sub: Path, load: Load) -> None:
    config = config_of(
        "program.pt2", {"ARGS[1]": FP32, "ARGS[0]": FP32}, {"RESULT[1]": FP32, "RESULT[0]": FP32}
    )
    instance = await load(config, add_sub)
    given = {"ARGS[0]": A, "ARGS[1]": B}
    assert run(instance, "RESULT[1] RESULT[0]", **given) == [(A - B).tolist(), (A + B).tolist()]


@pytest.mark.release
@COMPILES
async def test_a_compiled_package_runs_and_reads_only_what_it_was_given(
    package: Path, load: Load
) -> None:
    config = config_of(
        "model.pt2",
        {"INPUT__0": FP32, "INPUT__1": FP32},
        {"OUTPUT__0": FP32, "RESULT[1]": FP32},
        platform="torch_aoti",
    )
    instance = await load(config, package.parent)
    for rows in (0, 1, 2, 64):
        x, y = np.ones((rows, 16)), np.full((rows, 16), 2.0)
        assert run(instance, "OUTPUT__0 RESULT[1]", INPUT__0=x, INPUT__1=y) == [
            (x + y).tolist(),
            (x - y).tolist(),
        ]
    for x, y, text in (
        (np.ones((2, 15)), np.ones((2, 15)), "'INPUT__0' has shape [2,15], the model takes"),
        (np.ones((2, 16)), np.ones((3, 16)), "'INPUT__1' has shape [3,16], the model takes [2,16]"),
        (np.ones((65, 16)), np.ones((65, 16)), "dimension 0 at most 64"),
        (np.ones(16), np.ones(16), "'INPUT__0' has shape [16]"),
    ):
        assert text in refused(instance, {"INPUT__0": x, "INPUT__1": y}, "OUTPUT__0")
    whole = array_tensor("INPUT__0", Datatype.INT64, np.ones((2, 16), dtype="<i8"))
    text = refused(instance, {"INPUT__0": whole, "INPUT__1": B}, "OUTPUT__0")
    assert "has datatype INT64, the model takes FP32" in text


async def test_a_dict_is_served_by_its_keys(tmp_path: Path, load: Load) -> None:
    models.script(models.Keyed(), tmp_path / "model.pt")
    keys = {"b": FP32, "a": FP32}
    instance = await load(config_of("model.pt", keys, {"difference": FP32, "sum": FP32}), tmp_path)
    assert run(instance, "sum difference", a=[1.0], b=[2.0]) == [[3], [-1]]
    other = await load(config_of("model.pt", keys, {"product": FP32}), tmp_path)
    text = refused(other, {"a": [1.0], "b": [1.0]}, "product")
    assert text == "output tensor 'product' is not found; the model gives difference, sum"


async def test_a_list_is_served_by_index(tmp_path: Path, load: Load) -> None:
    models.script(models.Listed(), tmp_path / "model.pt")
    instance = await load(
        config_of("model.pt", {"x__1": FP32, "x__0": FP32}, {"y__0": FP32, "y__1": FP32}), tmp_path
    )
    assert run(instance, "y__0 y__1", x__0=[5.0], x__1=[2.0]) == [[3], [5]]
    beyond = await load(
        config_of("model.pt", {"x__1": FP32, "x__0": FP32}, {"y__2": FP32}), tmp_path
    )
    text = refused(beyond, {"x__0": [5.0], "x__1": [2.0]}, "y__2")
    assert text.endswith("refers to an output index which doesn't exist. This model has 2 outputs")


async def test_strings_are_lists_of_text(tmp_path: Path, load: Load) -> None:
    models.script(models.Shouting(), tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": STRING}, {"y": STRING}, dims=(-1,)), tmp_path)
    assert run(instance, "y", x=text_tensor("x", ["a", "b€"])) == [[b"A", "B€".encode()]]


async def test_optional_arguments_may_be_missing(tmp_path: Path, load: Load) -> None:
    models.script(models.Choosy(), tmp_path / "model.pt")
    both = await load(config_of("model.pt", {"x": FP32, "shift": FP32}, {"y": FP32}), tmp_path)
    assert run(both, "y", x=[1.0], shift=[10.0]) == [[12]]
    assert run(both, "y", x=[1.0]) == [[2]]
    assert "input 'x' of model 'm' is missing" in refused(both, {"shift": [1.0]})
    alone = await load(config_of("model.pt", {"x": FP32}, {"y": FP32}), tmp_path)
    assert run(alone, "y", x=[4.0]) == [[8]]


@pytest.mark.parametrize("form", ["script", "export"])
async def test_a_model_that_writes_to_its_input_does_not_change_the_request(
    form: str, tmp_path: Path, load: Load
) -> None:
    if form == "script":
        models.script(models.Overwriting(), tmp_path / "model.pt")
    else:
        models.export(models.Overwriting(), tmp_path / "model.pt", torch.ones(2), torch.ones(2))
    instance = await load(config_of("model.pt", {"x": FP32, "y": FP32}, {"z": FP32}), tmp_path)
    body = np.ones(2, dtype="<f4").tobytes()
    before = bytes(bytearray(body))
    x = Tensor("x", Datatype.FP32, (2,), body)
    assert run(instance, "z", x=x, y=[0.0, 0.0]) == [[2, 2]]
    assert body == before


@pytest.mark.parametrize("form", ["script", "export"])
async def test_outputs_share_the_requests_memory_but_never_the_models(
    form: str, tmp_path: Path, load: Load
) -> None:
    if form == "script":
        models.script(models.Weight(), tmp_path / "model.pt")
    else:
        models.export(models.Weight(), tmp_path / "model.pt", torch.ones(2, 3))
    instance = await load(
        config_of("model.pt", {"x": FP32}, {"a__0": FP32, "w__1": FP32}), tmp_path
    )
    x = fp32("x", np.ones((2, 3)))
    found = instance.run({"x": x}, ["a__0", "w__1"], frozenset())
    assert np.shares_memory(found["a__0"].array(), x.array())
    weight = found["w__1"].array()
    again = instance.run({"x": x}, ["w__1"], frozenset())["w__1"].array()
    assert weight.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert not np.shares_memory(weight, again)


@pytest.mark.parametrize("mode", ["true", "false"])
async def test_parameters_that_need_gradients_do_not_reach_the_outputs(
    mode: str, tmp_path: Path, load: Load
) -> None:
    models.script(models.Linear(), tmp_path / "model.pt")
    parameters = {"INFERENCE_MODE": mode, "DISABLE_OPTIMIZED_EXECUTION": mode}
    config = config_of("model.pt", {"x": FP32}, {"y": FP32}, parameters=parameters)
    instance = await load(config, tmp_path)
    assert run(instance, "y", x=[[1.0, 0.0, 0.0]]) == [[[0, 1]]]


async def test_a_failed_execution_is_reported_and_the_next_is_served(
    tmp_path: Path, load: Load
) -> None:
    models.script(models.Raising(), tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": FP32}, {"y": FP32}), tmp_path)
    text = refused(instance, {"x": [1.0]})
    assert text == "model 'm': PyTorch execute failure: the input is positive"
    assert run(instance, "y", x=[-1.0]) == [[-1]]


@pytest.mark.parametrize(
    ("module", "shape", "text"),
    [
        (models.Linear(), (2, 4), "PyTorch execute failure: mat1 and mat2 shapes cannot be"),
        (models.Scalar(), (2, 3), "output 'y' is a scalar which is not supported."),
    ],
)
async def test_an_input_that_does_not_fit_is_refused(
    module: torch.nn.Module, shape: tuple[int, ...], text: str, tmp_path: Path, load: Load
) -> None:
    models.script(module, tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": FP32}, {"y": FP32}), tmp_path)
    assert text in refused(instance, {"x": np.ones(shape)})


async def test_another_datatype_than_configured_is_refused_with_tritons_text(
    tmp_path: Path, load: Load
) -> None:
    models.script(models.Echo(), tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": FP32}, {"y": INT64}), tmp_path)
    assert refused(instance, {"x": [1.0]}) == (
        "configuration expects datatype TYPE_INT64 for output 'y', model provides TYPE_FP32"
    )


async def test_requests_of_a_batch_get_their_own_rows(add_sub: Path, load: Load) -> None:
    config = config_of(
        "script.pt",
        {"INPUT0": FP32, "INPUT1": FP32},
        {"OUTPUT__0": FP32, "OUTPUT__1": FP32},
        dims=(16,),
        max_batch_size=8,
    )
    instance = await load(config, add_sub)
    requests = [
        InferRequest(model="m", inputs=(fp32("INPUT0", A + n), fp32("INPUT1", B))) for n in range(3)
    ]
    answers = [answer async for answer in instance.execute(requests)]
    assert [index for index, _ in answers] == [0, 1, 2]
    for index, response in answers:
        assert isinstance(response, InferResponse)
        sums, differences = response.outputs
        assert sums.array().tolist() == (A + index + B).tolist()
        assert differences.array().tolist() == (A + index - B).tolist()


async def test_the_event_loop_runs_during_an_execution(tmp_path: Path, load: Load) -> None:
    models.script(models.Busy(), tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": FP32}, {"y": FP32}), tmp_path)
    big = fp32("x", np.zeros((600, 600)))
    request = InferRequest(model="m", inputs=(big,))
    turns = 0

    async def answer() -> list[Any]:
        return [each async for each in instance.execute([request])]

    running = asyncio.create_task(answer())
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await running) == 1
    assert turns > 100


async def test_instances_share_weights_only_if_asked(tmp_path: Path, load: Load) -> None:
    """A model whose memory a run changes shows whose memory it is."""
    models.script(models.Counter(), tmp_path / "model.pt")
    for sharing, expected in (("true", [2.0]), ("false", [1.0])):
        config = config_of(
            "model.pt", {"x": FP32}, {"y": FP32}, parameters={"ENABLE_WEIGHT_SHARING": sharing}
        )
        backend = PytorchBackend()
        first, second = [await load(config, tmp_path, backend) for _ in range(2)]
        assert run(first, "y", x=[0.0]) == [[1.0]]
        assert run(second, "y", x=[0.0]) == [expected]


async def test_a_file_that_has_changed_is_not_shared_with_the_old_one(
    tmp_path: Path, load: Load
) -> None:
    config = config_of(
        "model.pt", {"x": FP32}, {"y": FP32}, parameters={"ENABLE_WEIGHT_SHARING": "true"}
    )
    backend = PytorchBackend()
    models.script(models.Echo(), tmp_path / "model.pt")
    old = await load(config, tmp_path, backend)
    models.script(models.Counter(), tmp_path / "new.pt").rename(tmp_path / "model.pt")
    new = await load(config, tmp_path, backend)
    assert run(old, "y", x=[7.0]) == [[7]]
    assert run(new, "y", x=[7.0]) == [[8]]


async def test_errors_of_an_execution_reach_every_request(tmp_path: Path, load: Load) -> None:
    models.script(models.Raising(), tmp_path / "model.pt")
    instance = await load(config_of("model.pt", {"x": FP32}, {"y": FP32}), tmp_path)
    request = InferRequest(model="m", inputs=(fp32("x", [1.0]),))
    with pytest.raises(InferenceError) as raised:
        _ = [answer async for answer in instance.execute([request])]
    assert raised.value.code is Code.INTERNAL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["script", "export"])
async def test_a_model_runs_on_a_gpu(form: str, tmp_path: Path, load: Load) -> None:
    if form == "script":
        models.script(models.Linear(), tmp_path / "model.pt")
    else:
        models.export(models.Linear(), tmp_path / "model.pt", torch.ones(1, 3))
    group = InstanceGroup(name="g", kind=InstanceKind.KIND_GPU)
    config = config_of(
        "model.pt", {"x": FP32}, {"y": FP32}, parameters={"ENABLE_CACHE_CLEANING": "true"}
    )
    instance = await load(config, tmp_path, group=group)
    assert run(instance, "y", x=[[0.0, 1.0, 0.0]]) == [[[2, 3]]]
