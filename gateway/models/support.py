"""Which fields of a configuration does this release honour, ignore, or refuse?"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.schema import Cardinality, FieldShape, shapes


class Verdict(StrEnum):
    """What becomes of a field that a configuration sets."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Support:
    """The verdict on a field and on everything below it, and why."""

    verdict: Verdict
    why: str = ""


HONOURED = Support(Verdict.HONOURED)
ONE_BY_ONE = Support(Verdict.IGNORED, "requests are executed one by one")
TENSORRT_ONLY = Support(Verdict.REFUSED, "only TensorRT has such tensors")


def _ignored(why: str) -> Support:
    return Support(Verdict.IGNORED, why)


def _refused(why: str) -> Support:
    return Support(Verdict.REFUSED, why)


SUPPORT = {
    "name": HONOURED,
    "platform": HONOURED,
    "backend": HONOURED,
    "runtime": _refused("a backend has one implementation here"),
    "version_policy": HONOURED,
    "max_batch_size": HONOURED,
    "input.name": HONOURED,
    "input.data_type": HONOURED,
    "input.format": HONOURED,
    "input.dims": HONOURED,
    "input.reshape": _refused("tensors reach the backend in the shape of the request"),
    "input.is_shape_tensor": TENSORRT_ONLY,
    "input.allow_ragged_batch": ONE_BY_ONE,
    "input.optional": HONOURED,
    "input.is_non_linear_format_io": TENSORRT_ONLY,
    "output.name": HONOURED,
    "output.data_type": HONOURED,
    "output.dims": HONOURED,
    "output.reshape": _refused("tensors leave in the shape that the backend gives them"),
    "output.label_filename": _ignored("classifications carry no labels"),
    "output.is_shape_tensor": TENSORRT_ONLY,
    "output.is_non_linear_format_io": TENSORRT_ONLY,
    "batch_input": _refused("no inputs are derived from a batch"),
    "batch_output": _refused("outputs are not split by the shape of an input"),
    "optimization": _ignored("hints about speed; the backend has its own settings"),
    "dynamic_batching": ONE_BY_ONE,
    "sequence_batching": _refused("requests of a sequence are not kept together"),
    "ensemble_scheduling": _refused("models are not wired into one"),
    "instance_group.name": HONOURED,
    "instance_group.kind": HONOURED,
    "instance_group.count": HONOURED,
    "instance_group.rate_limiter": _ignored("executions are not limited across models"),
    "instance_group.gpus": _refused("the backend chooses its devices"),
    "instance_group.secondary_devices": _refused("no backend has secondary devices"),
    "instance_group.profile": _refused("only TensorRT has profiles"),
    "instance_group.passive": _refused("every instance takes requests"),
    "instance_group.host_policy": _ignored("instances are not pinned to cores or memory"),
    "default_model_filename": HONOURED,
    "cc_model_filenames": _ignored("the default model file is used on every device"),
    "metric_tags": _ignored("metrics carry the labels model and version only"),
    "parameters": HONOURED,
    "model_warmup": _ignored("no requests are executed before the model is ready"),
    "model_operations": _refused("no libraries of custom operations are loaded"),
    "model_transaction_policy": HONOURED,
    "model_repository_agents": _refused("no agents act on the model's files"),
    "response_cache": _ignored("responses are not kept"),
    "model_metrics": _ignored("histograms have fixed buckets"),
}
"""The verdict on every field by its path; one on a message holds for all fields below it."""


def require_supported(config: ModelConfig) -> None:
    """Raise UNSUPPORTED if the config, as it was written, sets a field that is refused."""
    for path in _paths_set(config):
        support = SUPPORT[path]
        if support.verdict is Verdict.REFUSED:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"field '{path}' of model '{config.name}' is not supported: {support.why}",
            )


def is_default(owner: Any, shape: FieldShape) -> bool:
    """Whether a dataclass has in this field what it has when nothing is given."""
    value = getattr(owner, shape.attribute)
    return bool(value == getattr(owner.__class__(), shape.attribute))


def _paths_set(owner: Any, above: str = "") -> Iterator[str]:
    for shape in shapes(owner.__class__):
        path = above + shape.name
        if is_default(owner, shape):
            continue
        if path in SUPPORT:
            yield path
            continue
        value = getattr(owner, shape.attribute)
        for each in value if shape.cardinality is Cardinality.MANY else (value,):
            yield from _paths_set(each, f"{path}.")
