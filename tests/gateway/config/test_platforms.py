"""A model gets the backend that Triton would find."""

import pytest

from gateway.config import ModelConfig
from gateway.config.platforms import accepted_platforms, resolve_backend
from gateway.errors import Code, InferenceError

Resolved = tuple[str, str, str]


def resolved(files: set[str], **given: str) -> Resolved:
    config = resolve_backend(ModelConfig(**{"name": "m", **given}), files)  # type: ignore[arg-type]
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.savedmodel/"}, ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ({"model.graphdef"}, ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ({"model.plan"}, ("tensorrt", "tensorrt_plan", "model.plan")),
        ({"model.onnx"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"model.onnx/"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"model.xml", "model.bin"}, ("openvino", "", "model.xml")),
        ({"model.pt"}, ("pytorch", "pytorch_libtorch", "model.pt")),
        ({"model.pt2"}, ("pytorch", "torch_aoti", "model.pt2")),
        ({"model.py"}, ("python", "", "model.py")),
        ({"xgboost.json"}, ("fil", "", "xgboost.json")),
        ({"xgboost.ubj"}, ("fil", "", "xgboost.ubj")),
        ({"xgboost.model"}, ("fil", "", "xgboost.model")),
        ({"checkpoint.tl"}, ("fil", "", "checkpoint.tl")),
        ({"model.py", "model.onnx"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
    ],
)
def test_a_default_file_gives_the_backend_away(files: set[str], expected: Resolved) -> None:
    assert resolved(files) == expected


@pytest.mark.parametrize(
    "files", [{"model.savedmodel"}, {"model.plan/"}, {"other.onnx"}, {"model.json"}, {"model.txt"}]
)
def test_a_folder_is_no_file_and_a_file_no_folder(files: set[str]) -> None:
    with pytest.raises(InferenceError):
        resolved(files)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"default_model_filename": "model.onnx"},
            ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ),
        (
            {"platform": "pytorch_libtorch"},
            ("pytorch", "pytorch_libtorch", "model.pt"),
        ),
        ({"platform": "torch_aoti"}, ("pytorch", "torch_aoti", "model.pt2")),
        ({"platform": "tensorrt_plan"}, ("tensorrt", "tensorrt_plan", "model.plan")),
        ({"platform": "ensemble"}, ("", "ensemble", "")),
        ({"platform": "other"}, ("", "other", "")),
        ({"default_model_filename": "other.py"}, ("", "", "other.py")),
    ],
)
def test_a_config_that_names_file_or_platform_decides(
    given: dict[str, str], expected: Resolved
) -> None:
    assert resolved({"model.py"}, **given) == expected


@pytest.mark.parametrize(
    ("given", "files", "expected"),
    [
        ({"backend": "onnxruntime"}, set(), ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"backend": "pytorch"}, set(), ("pytorch", "pytorch_libtorch", "model.pt")),
        ({"backend": "pytorch"}, {"model.pt2"}, ("pytorch", "torch_aoti", "model.pt2")),
        (
            {"backend": "pytorch", "default_model_filename": "my.pt"},
            {"model.pt2"},
            ("pytorch", "pytorch_libtorch", "my.pt"),
        ),
        ({"backend": "python"}, {"model.onnx"}, ("python", "", "model.py")),
        ({"backend": "python", "platform": "any"}, set(), ("python", "any", "model.py")),
        (
            {"backend": "tensorflow"},
            {"model.graphdef"},
            ("tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ),
        ({"backend": "tensorflow"}, set(), ("tensorflow", "", "")),
        ({"backend": "vllm"}, {"model.py"}, ("vllm", "", "")),
        ({"backend": "fil"}, {"xgboost.json", "model.txt"}, ("fil", "", "")),
        (
            {"backend": "onnxruntime", "platform": "tensorrt_plan"},
            {"model.onnx"},
            ("onnxruntime", "tensorrt_plan", ""),
        ),
    ],
)
def test_an_explicit_backend_wins_and_is_completed(
    given: dict[str, str], files: set[str], expected: Resolved
) -> None:
    assert resolved(files, **given) == expected


def test_the_name_of_the_folder_is_the_last_resort() -> None:
    assert resolved(set(), name="m.my.backend") == ("my.backend", "", "model.my.backend")
    assert resolved({"model.py"}, name="m.my.backend") == ("python", "", "model.py")


def test_a_model_that_identifies_no_backend_is_refused() -> None:
    with pytest.raises(InferenceError) as caught:
        resolved({"weights.bin"})
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )


@pytest.mark.parametrize(
    ("backend", "platforms"),
    [
        ("tensorrt", {"tensorrt_plan"}),
        ("tensorflow", {"tensorflow_savedmodel", "tensorflow_graphdef"}),
        ("onnxruntime", {"onnxruntime_onnx"}),
        ("pytorch", {"pytorch_libtorch", "torch_aoti"}),
        ("python", set()),
        ("vllm", set()),
    ],
)
def test_some_backends_insist_on_their_platforms(backend: str, platforms: set[str]) -> None:
    assert accepted_platforms(backend) == platforms
