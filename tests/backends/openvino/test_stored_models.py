"""The encoder and the DenseNet of `sluice fetch` by OpenVINO, against ONNX Runtime."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from gateway.config import ModelConfig
from gateway.messages import InferRequest, InferResponse
from gateway.settings import ENVIRONMENT
from gateway.storage.store import ModelStore, default_root
from gateway.tensor import Datatype, array_tensor
from tests.backends.openvino.conftest import backend
from tests.builders import soon
from tests.encoders import SENTENCES, TOLERANCE, Array, encode, padded
from tests.tensor_backends import answers, context

ONNX = ModelConfig(name="m", backend="openvino", default_model_filename="model.onnx")


def stored(name: str) -> Path:
    """The folder of a stored model; a test without it is skipped."""
    store = ModelStore(default_root(ENVIRONMENT))
    if not store.has(name):
        pytest.skip(f"needs `sluice fetch {name}`")
    return store.path(name)


async def compare(folder: Path, config: ModelConfig, inputs: dict[str, Array]) -> None:
    """Every output is that of ONNX Runtime."""
    runtime = backend()
    whole = runtime.complete(config, folder)
    # Compiling takes long on a busy machine: only the limit of the whole test holds.
    instance = await runtime.load(context(whole, folder))
    datatypes = {each.name: each.datatype for each in whole.input}
    tensors = tuple(array_tensor(name, datatypes[name], each) for name, each in inputs.items())
    try:
        ((_, found),) = await answers(instance, InferRequest(model="m", inputs=tensors))
    finally:
        await soon(instance.close())
    assert isinstance(found, InferResponse), found
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [each.name for each in found.outputs]
    assert set(names) == {each.name for each in session.get_outputs()}
    for output, expected in zip(found.outputs, session.run(names, inputs), strict=True):
        assert output.datatype is Datatype.FP32
        np.testing.assert_allclose(output.array(), expected, atol=TOLERANCE, rtol=TOLERANCE)


async def test_sentences_of_many_lengths_have_the_same_embeddings() -> None:
    folder = stored("all-minilm-l6-v2-onnx")
    each = [encode(folder, text) for text in SENTENCES]
    longest = max(inputs["input_ids"].shape[1] for inputs in each)
    await compare(folder, replace(ONNX, max_batch_size=8), padded(each, longest))


async def test_a_picture_has_the_same_scores() -> None:
    picture = np.random.default_rng(7).random((1, 3, 224, 224), np.float32)
    await compare(stored("densenet-121-onnx"), ONNX, {"data_0": picture})
