"""The gateway's side of the backend: files, permission, configs, and requests without outputs."""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.sklearn.backend import SklearnBackend
from backends.sklearn.instance import SklearnInstance
from gateway.config import (
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TransactionPolicy,
)
from gateway.config.data_type import DataType
from gateway.config.platforms import resolve_backend
from gateway.config.scheduling import SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.supported_fields import ignored
from gateway.stream import ResponseStream
from gateway.tensor import Datatype
from tests.backends.sklearn.conftest import ROWS, OwnScaler, Save, write_estimator
from tests.builders import ScriptedInstance, text_response
from tests.tensor_backends import Load, answers, ask, context, loading, request

FP64 = Datatype.FP64
LOAD_SECS = 60.0
"""A load starts a process that imports scikit-learn, while engines of other tests start."""


def backend(**settings: str) -> SklearnBackend:
    found = SklearnBackend()
    found.settings = settings
    return found


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    """Loads models, from the file model.skops of the version folder if one is given."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)

    def save(made: Any, where: Path) -> None:
        write_estimator(made, where / "model.skops")

    async with loading(folder, SklearnBackend, save, LOAD_SECS) as found:
        yield found


def refusal(config: ModelConfig, folder: Path, **settings: str) -> InferenceError:
    with pytest.raises(InferenceError) as refused:
        backend(**settings).complete(config, folder)
    return refused.value


@pytest.mark.parametrize("name", ["model.joblib", "model.pkl", "model.pickle"])
@pytest.mark.parametrize("settings", [{}, {"allow-pickle": "false"}])
def test_a_pickle_needs_permission(save: Save, name: str, settings: dict[str, str]) -> None:
    folder = save(OwnScaler(), name)
    # A repository cannot permit it.
    config = ModelConfig(name="m", parameters={"allow-pickle": "true", "allow_pickle": "true"})
    error = refusal(config, folder, **settings)
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        f"model 'm': '{name}' is a pickle, and loading one runs any program it holds; save "
        "it by skops, or convert it to ONNX, or start with "
        "--backend-config=sklearn,allow-pickle=true"
    )


async def test_a_load_asks_for_permission_again(save: Save) -> None:
    folder = save(OwnScaler(), "model.pkl")
    with pytest.raises(InferenceError, match=r"'model\.pkl' is a pickle"):
        await backend().load(context(ModelConfig(name="m"), folder))


def test_the_permission_is_a_boolean(save: Save) -> None:
    folder = save(OwnScaler(), "model.pkl")
    error = refusal(ModelConfig(name="m"), folder, **{"allow-pickle": "perhaps"})
    assert error.message == "parameter 'allow-pickle': failed to convert 'perhaps' to boolean"


@pytest.mark.parametrize(
    ("file", "code", "text"),
    [
        ("", Code.UNAVAILABLE, "unable to find '1/model.skops' for model instance 'm'"),
        ("other.skops", Code.UNAVAILABLE, "unable to find '1/other.skops' for model instance"),
        ("../../x.skops", Code.INVALID_ARG, "is outside of the model's folder"),
        ("notes.txt", Code.INVALID_ARG, "names 'notes.txt', expected a file of .skops or a pickle"),
    ],
)
def test_a_file_that_is_missing_or_of_another_kind_is_refused(
    tmp_path: Path, file: str, code: Code, text: str
) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    error = refusal(ModelConfig(name="m", default_model_filename=file), folder)
    assert error.code is code
    assert text in error.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            ModelConfig(model_transaction_policy=TransactionPolicy(decoupled=True)),
            "model 'm' is decoupled, but an estimator has one response per request",
        ),
        (
            ModelConfig(sequence_batching=SequenceBatching()),
            "model 'm' has sequence_batching, but an estimator keeps no state",
        ),
    ],
)
def test_configs_of_other_models_are_refused(save: Save, config: ModelConfig, text: str) -> None:
    error = refusal(replace(config, name="m"), save(OwnScaler()))
    assert error.message == text


async def test_gpus_are_refused(save: Save) -> None:
    group = InstanceGroup(name="m", kind=InstanceKind.KIND_GPU, count=1)
    with pytest.raises(InferenceError, match="has instances of KIND_GPU, expected KIND_CPU"):
        await backend().load(context(ModelConfig(name="m"), save(OwnScaler()), group))


@pytest.mark.parametrize("name", ["model.skops", "model.joblib", "model.pkl", "model.pickle"])
def test_a_folder_without_a_config_is_recognised_by_its_file(name: str) -> None:
    found = resolve_backend(ModelConfig(name="m"), {name, "notes.txt"})
    assert (found.backend, found.default_model_filename) == ("sklearn", name)


WHOLE = ModelConfig(
    input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(4,)),),
    output=(ModelOutput(name="transform", data_type=DataType.TYPE_FP32, dims=(4,)),),
    max_batch_size=8,
)


def test_a_whole_config_is_completed_without_a_worker(save: Save) -> None:
    config = replace(WHOLE, name="m")
    found = backend().complete(config, save({"no": "estimator"}))
    assert found == replace(config, default_model_filename="model.skops")


async def test_a_folder_with_a_file_alone_is_served(
    load: Load, estimators: Mapping[str, Any]
) -> None:
    instance = await load(estimators["scaler"])
    rows = [ROWS[:2], ROWS[2:3]]
    found = await ask(instance, *(request({"X": each}, FP64) for each in rows))
    for each, answer in zip(rows, found, strict=True):
        assert answer == {"transform": estimators["scaler"].transform(each).tolist()}
    (_, error), (_, good) = await answers(
        instance,
        request({"X": np.full((1, 4), np.inf)}, FP64),
        request({"X": ROWS[:1]}, FP64),
    )
    assert isinstance(error, InferenceError)
    assert error.code is Code.INVALID_ARG
    assert error.message.startswith("model 'm': Input X contains infinity")
    assert not isinstance(good, InferenceError)


async def test_an_untrusted_type_fails_the_load_by_its_code(load: Load) -> None:
    with pytest.raises(InferenceError, match=r"types that are not trusted: .*OwnScaler") as refused:
        await load(OwnScaler())
    assert refused.value.code is Code.INVALID_ARG


async def test_an_execution_that_is_closed_ends_in_the_worker() -> None:
    worker, stream = ScriptedInstance(), ResponseStream()
    instance = SklearnInstance(worker, with_outputs("predict"))
    asked = replace(request({"X": ROWS[:1]}, FP64), cancellation=stream)
    async with aclosing(instance.execute([asked])) as found:
        asking = asyncio.create_task(anext(found))
        execution = await worker.begun()
        assert execution.requests[0].cancellation is stream
        execution.answer(text_response(""))
        await asking
    assert execution.stopped.is_set()


async def asked_for(config: ModelConfig, *outputs: str) -> list[str]:
    """The outputs that a worker computes for a request that names these."""
    worker = ScriptedInstance()
    asking = asyncio.create_task(
        answers(SklearnInstance(worker, config), request({"X": ROWS[:1]}, FP64, outputs))
    )
    execution = await worker.begun()
    execution.answer(text_response("", final=True))
    execution.end()
    await asking
    seen: tuple[InferRequest, ...] = execution.requests
    return [each.name for each in seen[0].outputs]


def with_outputs(*names: str) -> ModelConfig:
    return ModelConfig(name="m", output=tuple(ModelOutput(name=each) for each in names))


async def test_a_request_without_outputs_gets_the_first_of_the_methods() -> None:
    assert await asked_for(with_outputs("predict_proba", "predict")) == ["predict"]
    assert await asked_for(with_outputs("decision_function", "transform")) == ["transform"]
    assert await asked_for(with_outputs("predict_proba")) == ["predict_proba"]
    assert await asked_for(with_outputs("predict", "transform"), "transform") == ["transform"]


def test_doctor_names_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(each.what, each.fix) for each in backend().facts] == [
        ("scikit-learn", ""),
        ("skops", ""),
    ]

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert {(each.found, each.fix) for each in backend().facts} == {
        ("not installed", "pip install 'sluice[sklearn]'")
    }


def test_check_says_that_a_config_permits_no_pickles() -> None:
    config = ModelConfig(parameters={"allow-pickle": "true", "trusted_types": "a.B"})
    assert list(ignored(config, "sklearn")) == [
        (
            "parameters.allow-pickle",
            "only --backend-config=sklearn,allow-pickle=true permits pickles",
        )
    ]
