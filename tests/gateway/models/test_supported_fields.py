"""The table of supported fields fits the schema and the behaviour."""

from collections.abc import Iterator

import pytest

from gateway.config import (
    InstanceGroup,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelResponseCache,
    SecondaryDevice,
)
from gateway.config.optimization import CudaOptions, OptimizationPolicy
from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.config.schema import FieldTree, field_tree
from gateway.errors import Code, InferenceError
from gateway.models.supported_fields import (
    PARAMETERS,
    SUPPORT,
    FieldVerdict,
    ignored,
    require_supported,
)


def paths(tree: FieldTree, above: str = "") -> Iterator[str]:
    for name, below in tree.items():
        yield above + name
        yield from paths(below, f"{above}{name}.")


def leaves(tree: FieldTree) -> Iterator[str]:
    every = list(paths(tree))
    return (path for path in every if not any(each.startswith(f"{path}.") for each in every))


def verdicts_above(path: str) -> list[str]:
    names = path.split(".")
    return [part for end in range(len(names)) if (part := ".".join(names[: end + 1])) in SUPPORT]


def test_every_field_has_exactly_one_verdict() -> None:
    unclear = [path for path in leaves(field_tree(ModelConfig)) if len(verdicts_above(path)) != 1]
    assert unclear == []


def test_every_verdict_is_on_a_field() -> None:
    assert SUPPORT.keys() <= set(paths(field_tree(ModelConfig)))


def test_each_field_that_is_not_honoured_has_a_reason() -> None:
    silent = [
        path
        for path, support in (SUPPORT | PARAMETERS).items()
        if support.verdict is not FieldVerdict.HONOURED and not support.why
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (
            ModelConfig(
                name="m",
                ensemble_scheduling=EnsembleScheduling(step=(EnsembleStep(model_namespace="n"),)),
            ),
            "ensemble_scheduling.step.model_namespace",
        ),
        (
            ModelConfig(name="m", input=(ModelInput(), ModelInput(is_non_linear_format_io=True))),
            "input.is_non_linear_format_io",
        ),
        (
            ModelConfig(name="m", output=(ModelOutput(is_non_linear_format_io=True),)),
            "output.is_non_linear_format_io",
        ),
    ],
)
def test_a_config_that_sets_a_refused_field_is_refused(config: ModelConfig, path: str) -> None:
    with pytest.raises(InferenceError) as caught:
        require_supported(config)
    assert caught.value.code is Code.UNSUPPORTED
    assert caught.value.message == (
        f"field '{path}' of model 'm' is not supported: {SUPPORT[path].why}"
    )


def test_a_config_that_sets_fields_to_be_ignored_is_accepted() -> None:
    require_supported(
        ModelConfig(
            cc_model_filenames={"7.5": "model.plan"},
            response_cache=ModelResponseCache(enable=True),
        )
    )


def test_every_ignored_field_is_named_with_the_reason() -> None:
    config = ModelConfig(
        max_batch_size=4,
        cc_model_filenames={"7.5": "model.plan"},
        parameters={"TRITON_BATCH_STRATEGY_PATH": "/batch.so", "other": "value"},
    )
    assert list(ignored(config)) == [
        ("cc_model_filenames", "the default model file is used on every device"),
        (
            "parameters.TRITON_BATCH_STRATEGY_PATH",
            "no library decides which requests share a batch",
        ),
    ]
    assert list(ignored(ModelConfig(name="m"))) == []


def test_what_one_backend_honours_is_ignored_by_the_others() -> None:
    config = ModelConfig(
        cc_model_filenames={"7.5": "model.plan"},
        optimization=OptimizationPolicy(cuda=CudaOptions(graphs=True), eager_batching=True),
        instance_group=(InstanceGroup(secondary_devices=(SecondaryDevice(),)),),
    )
    unused = ("optimization.eager_batching", "a hint about speed that makes no difference here")
    assert list(ignored(config, "tensorrt")) == [unused]
    assert [path for path, _ in ignored(config, "onnxruntime")] == [
        "optimization.cuda",
        "optimization.eager_batching",
        "instance_group.secondary_devices",
        "cc_model_filenames",
    ]


def test_a_refused_field_may_be_set_to_its_default() -> None:
    require_supported(
        ModelConfig(
            input=(ModelInput(is_non_linear_format_io=False),),
            instance_group=(InstanceGroup(secondary_devices=(), passive=False),),
        )
    )
