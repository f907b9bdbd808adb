"""Loads of forests: their files, completion, checks and failures."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from backends.fil.backend import FilBackend
from backends.fil.model_file import find_model
from gateway.backend_loader import BackendLoader
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.config.pbtxt import parse
from gateway.config.platforms import resolve_backend
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.tools.draft import draft, open_file
from tests.backends.fil.conftest import (
    HOLES,
    LABELS,
    checkpoint_of,
    config,
    json_of,
    lgb,
    output,
    save,
    text_of,
    ubj_of,
    xgb,
)
from tests.backends.fil.old_binary import LEAVES, old_binary
from tests.builders import soon
from tests.tensor_backends import Load, ask, context, floats

BINARY = "binary:logistic"
X = ModelInput(name="input__0", data_type=DataType.TYPE_FP32, dims=(5,))
WHOLE = replace(config(), max_batch_size=8, input=(X,), output=(output(1),))


def complete(files: dict[str, bytes], folder: Path, given: ModelConfig) -> ModelConfig:
    whole = FilBackend().complete(given, save(files, folder))
    check_tensors(whole)
    return whole


async def failure(folder: Path, given: ModelConfig = WHOLE) -> InferenceError:
    """The reason why a forest cannot be loaded; never with a path of the host or C++ sources."""
    with pytest.raises(InferenceError) as caught:
        await soon(FilBackend().load(context(given, folder)))
    message = caught.value.message
    assert str(folder.parents[1]) not in message
    assert not re.search(r"/workspace|src/|\.cc:\d|\.so|Stack|\n", message), message
    return caught.value


def test_the_backend_is_found_by_its_name() -> None:
    assert type(BackendLoader().get("fil")) is FilBackend


# Completion and files.


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("xgboost.json", json_of(xgb(BINARY))),
        ("xgboost.ubj", ubj_of(xgb(BINARY))),
        ("xgboost.model", ubj_of(xgb(BINARY))),
        ("xgboost.model", old_binary()),
        ("checkpoint.tl", checkpoint_of(xgb(BINARY))),
    ],
)
def test_a_folder_without_a_config_is_completed(folder: Path, name: str, data: bytes) -> None:
    resolved = resolve_backend(ModelConfig(name="m"), {name})
    found = complete({name: data}, folder, resolved)
    assert (found.backend, found.max_batch_size) == ("fil", 32768)
    assert found.input == (X,)
    assert found.output == (output(1),)
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(32768,))


@pytest.mark.parametrize(
    ("train", "parameters", "dims"),
    [
        (partial(xgb, "multi:softprob", "classes"), {}, 1),
        (partial(xgb, "multi:softprob", "classes"), {"predict_proba": "true"}, 3),
        (partial(xgb, "multi:softprob", "classes"), {"is_classifier": "false"}, 3),
        (partial(xgb, BINARY), {"predict_proba": "true"}, 2),
        (partial(xgb, BINARY), {"predict_proba": "true", "is_classifier": "false"}, 1),
    ],
)
def test_dims_of_the_output_follow_from_the_file_and_the_parameters(
    folder: Path, train: Callable[[], Any], parameters: dict[str, str], dims: int
) -> None:
    found = complete({"xgboost.model": ubj_of(train())}, folder, config(**parameters))
    assert found.output == (output(dims),)


@pytest.mark.parametrize("name", ["model.json", "model.ubj", "model.bst", "model.txt"])
async def test_names_of_other_servers_are_found_for_this_backend(load: Load, name: str) -> None:
    data = text_of(lgb("binary")) if name == "model.txt" else json_of(xgb(BINARY))
    with pytest.raises(InferenceError, match="Could not determine backend"):
        resolve_backend(ModelConfig(name="m"), {name})
    resolved = resolve_backend(ModelConfig(name="m", backend="fil"), {name})
    assert await ask(await load({name: data}, resolved), floats(input__0=HOLES[:1]))


@pytest.mark.parametrize(
    ("kind", "name", "data"),
    [
        ("xgboost", "xgboost.model", old_binary()),
        ("xgboost_json", "xgboost.json", json_of(xgb(BINARY))),
        ("xgboost_ubj", "xgboost.ubj", ubj_of(xgb(BINARY))),
        ("lightgbm", "model.txt", text_of(lgb("binary"))),
        ("treelite_checkpoint", "checkpoint.tl", checkpoint_of(xgb(BINARY))),
    ],
)
async def test_each_model_type_has_its_file(load: Load, kind: str, name: str, data: bytes) -> None:
    others = {"xgboost.json": b"", "xgboost.model": b"", "model.txt": b"", "checkpoint.tl": b""}
    instance = await load({**others, name: data}, config(model_type=kind))
    assert await ask(instance, floats(input__0=HOLES[:1]))


async def test_a_file_of_any_name_that_begins_with_a_brace_is_of_xgboost(load: Load) -> None:
    booster = xgb("reg:squarederror", "values")
    for kind, data in (("xgboost", ubj_of(booster)), ("treelite_checkpoint", json_of(booster))):
        asked = replace(config(model_type=kind), default_model_filename="my.bin")
        (found,) = await ask(await load({"my.bin": data}, asked), floats(input__0=HOLES))
        assert np.array_equal(found["output__0"], booster.inplace_predict(HOLES))


async def test_an_old_binary_of_xgboost_is_read_by_treelite(load: Load) -> None:
    instance = await load({"xgboost.model": old_binary()}, config(is_classifier="false"))
    rows = [[0] * 5, [1] * 5, [np.nan] * 5]
    (found,) = await ask(instance, floats(input__0=rows))
    low, high = 1 / (1 + np.exp(-np.array(LEAVES)))
    np.testing.assert_allclose(found["output__0"], [low, high, low], rtol=1e-6)


async def test_a_forest_of_dart_is_served(load: Load) -> None:
    booster = xgb("reg:squarederror", "values", "dart")
    (found,) = await ask(await load({"xgboost.json": json_of(booster)}), floats(input__0=HOLES))
    expected = booster.predict(xgboost.DMatrix(HOLES))
    np.testing.assert_allclose(found["output__0"], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["xgboost.json", "mine.ubj", "model.txt"])
def test_a_draft_is_the_completed_config(folder: Path, name: str) -> None:
    data = text_of(lgb("binary")) if name == "model.txt" else ubj_of(xgb(BINARY))
    file = save({name: data}, folder) / name
    found = parse(draft(open_file(file), BackendLoader()).text, "m")
    assert (found.backend, found.max_batch_size) == ("fil", 32768)
    assert (found.input, found.output) == ((X,), (output(1),))
    assert find_model(found, folder) == file


# Contradictions.


async def test_dims_must_be_the_files(folder: Path) -> None:
    save({"xgboost.model": json_of(xgb(BINARY))}, folder)
    wrong = replace(WHOLE, input=(replace(X, dims=(4,)),))
    assert (await failure(folder, wrong)).message == (
        "model 'm', tensor 'input__0': the model expects 2 dimensions (shape [-1,5]) but the model "
        "configuration specifies 2 dimensions (an initial batch dimension because max_batch_size > "
        "0 followed by the explicit tensor shape, making complete shape [-1,4])"
    )
    wrong = replace(WHOLE, output=(output(2),))
    assert "tensor 'output__0': the model expects" in (await failure(folder, wrong)).message
    shap = output(5, name="treeshap_output")
    wrong = replace(WHOLE, output=(output(1), shap))
    assert "shape [-1,6]" in (await failure(folder, wrong)).message
    wrong = replace(WHOLE, input=(replace(X, name="x"),))
    assert (await failure(folder, wrong)).message == (
        "unexpected inference input 'x', allowed inputs are: input__0"
    )
    wrong = replace(WHOLE, input=(replace(X, data_type=DataType.TYPE_FP64),))
    assert (
        "expects datatype TYPE_FP64 for input 'input__0'" in (await failure(folder, wrong)).message
    )


@pytest.mark.parametrize("kind", [InstanceKind.KIND_GPU, InstanceKind.KIND_MODEL])
async def test_instances_are_on_the_cpu(folder: Path, kind: InstanceKind) -> None:
    group = InstanceGroup(name="m", kind=kind)
    with pytest.raises(InferenceError, match=f"instances of {kind.name} are not supported"):
        await soon(FilBackend().load(context(WHOLE, folder, group)))


async def test_several_targets_are_refused(folder: Path) -> None:
    save({"xgboost.model": json_of(xgb("reg:squarederror", "targets"))}, folder)
    found = await failure(folder)
    assert (found.code, found.message) == (Code.UNKNOWN, "Multi-target model not supported")
    assert LABELS["targets"].shape[1] == 2


async def test_a_linear_model_is_no_forest(folder: Path) -> None:
    save({"xgboost.model": json_of(xgb(BINARY, booster="gblinear"))}, folder)
    assert "booster gblinear is a linear model" in (await failure(folder)).message


# Bad files.


async def test_a_missing_file_is_named_without_its_place_on_the_host(folder: Path) -> None:
    found = await failure(folder, replace(WHOLE, parameters={"model_type": "lightgbm"}))
    assert found.code is Code.UNAVAILABLE
    assert found.message == "unable to find '1/model.txt' for model instance 'm'"


async def test_an_unknown_model_type_is_refused(folder: Path) -> None:
    found = await failure(folder, replace(WHOLE, parameters={"model_type": "catboost"}))
    assert found.code is Code.UNSUPPORTED
    assert found.message == "catboost not recognized as a valid serialization format."


@pytest.mark.parametrize(
    ("kind", "name", "data"),
    [
        ("xgboost_json", "xgboost.json", json_of(xgb(BINARY))),
        ("xgboost_ubj", "xgboost.ubj", ubj_of(xgb(BINARY))),
        ("xgboost", "xgboost.model", old_binary()),
        ("lightgbm", "model.txt", text_of(lgb("binary")).partition(b"end of trees")[0]),
        ("lightgbm", "model.txt", text_of(lgb("binary")).partition(b"end of parameters")[0]),
        ("treelite_checkpoint", "checkpoint.tl", checkpoint_of(xgb(BINARY))),
    ],
)
@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.98])
async def test_a_file_that_is_cut_short_is_refused(
    folder: Path, kind: str, name: str, data: bytes, part: float
) -> None:
    save({name: data[: int(part * len(data))]}, folder)
    found = await failure(folder, replace(WHOLE, parameters={"model_type": kind}))
    assert found.message.startswith(f"unable to load model 'm': '1/{name}' is ")


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("xgboost", "xgboost.model", "'1/xgboost.model' is no model of XGBoost: expected JSON or"),
        ("lightgbm", "model.txt", "'1/model.txt' is no model of LightGBM: expected a text that"),
        ("treelite_checkpoint", "checkpoint.tl", "'1/checkpoint.tl' is cut short, or of a format"),
    ],
)
@pytest.mark.parametrize("data", [b"no model" * 100, b"\x80\x04\x95pickle", bytes(1000)])
async def test_a_file_of_another_format_is_refused(
    folder: Path, kind: str, name: str, expected: str, data: bytes
) -> None:
    save({name: data}, folder)
    found = await failure(folder, replace(WHOLE, parameters={"model_type": kind}))
    assert expected in found.message


async def test_other_json_is_refused(folder: Path) -> None:
    whole = json.loads(json_of(xgb(BINARY)))
    del whole["learner"]["gradient_booster"]
    for data in (b'{"learner":{}}', b"{}", b'{"a": [1', json.dumps(whole).encode()):
        save({"xgboost.model": data}, folder)
        assert f"XGBoost {xgboost.__version__} does not read" in (await failure(folder)).message


async def test_a_checkpoint_of_another_version_is_refused(folder: Path) -> None:
    data = checkpoint_of(xgb(BINARY))
    save({"checkpoint.tl": (9).to_bytes(4, "little") + data[4:]}, folder)
    asked = replace(WHOLE, parameters={"model_type": "treelite_checkpoint"})
    assert (
        "'1/checkpoint.tl' is cut short, or of a format" in (await failure(folder, asked)).message
    )
