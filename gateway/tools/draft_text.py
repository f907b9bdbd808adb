"""How does a drafted configuration read? As people write them, with what is worth changing said."""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.backend import Description
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.pbtxt import to_text

BATCHED = """\
# The largest batch that the server makes of requests: raise it as memory and latency allow.
# Tensors have a first dimension for the batch, which dims below leave out.
"""
UNBATCHED = """\
# 0: requests are not batched, and dims below are whole shapes. If the first dimension of every
# tensor is a batch, write its largest size here and leave that dimension out of dims.
"""
TENSORS = "# -1 in dims is a dimension of any size.\n"
DYNAMIC = """\
# Requests that wait at the same time are executed as one batch. With a delay, a request may wait
# so long for others: more throughput, and more latency where there is little traffic.
dynamic_batching {
  # max_queue_delay_microseconds: 500
}
"""
INSTANCES = """\
# Copies of the model that work side by side: more of them fill a device that one leaves idle.
# KIND_AUTO is a GPU where there is one, else the CPU; KIND_GPU and KIND_CPU insist.
instance_group [
  {
    count: 1
    kind: KIND_AUTO
  }
]
"""
DECOUPLED = """\
# A request may have any number of responses.
model_transaction_policy {
  decoupled: true
}
"""
UNTOLD = """\
    # {note}: fill in both, such as
    # data_type: TYPE_FP32
    # dims: [ -1 ]
"""
NO_TENSORS = """\
# The file does not tell the {role}s of the model: list them here, such as
# {role} [
#   {{
#     name: "{example}"
#     data_type: TYPE_FP32
#     dims: [ -1 ]
#   }}
# ]
"""


def draft_text(description: Description, origin: str, filename: str) -> str:
    """The text of `config.pbtxt`; `origin` is the file it was drafted from.

    `filename` is given if the configuration must name it.
    """
    return "\n".join(_parts(description, origin, filename))


def _parts(description: Description, origin: str, filename: str) -> Iterator[str]:
    """The paragraphs, each ending in a line feed."""
    config = description.config
    yield f"# Drafted from {origin} by `sluice config`.\n"
    yield _identity(config, filename)
    yield f"{BATCHED if config.batching else UNBATCHED}max_batch_size: {config.max_batch_size}\n"
    yield TENSORS + _tensors("input", config.input, description.notes)
    yield _tensors("output", config.output, description.notes)
    if config.dynamic_batching is not None:
        yield DYNAMIC
    if config.decoupled:
        yield DECOUPLED
    yield INSTANCES


def _identity(config: ModelConfig, filename: str) -> str:
    """Who runs the model, and from which file."""
    lines = (
        ModelConfig(backend=config.backend),
        ModelConfig(platform=config.platform),
        ModelConfig(default_model_filename=filename),
    )
    return "".join(map(to_text, lines))


def _tensors(
    role: str,
    tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...],
    notes: Mapping[str, str],
) -> str:
    if not tensors:
        return NO_TENSORS.format(role=role, example=f"{role.upper()}__0")
    entries = ",\n".join(
        "  {\n" + _tensor(each, notes.get(each.name, "")) + "  }" for each in tensors
    )
    return f"{role} [\n{entries}\n]\n"


def _tensor(tensor: ModelInput | ModelOutput, note: str) -> str:
    name = to_text(ModelConfig(name=tensor.name)).strip()
    if tensor.data_type is DataType.TYPE_INVALID or not tensor.dims:
        return f"    {name}\n" + UNTOLD.format(note=note or "data_type and dims are unknown")
    lines = [name, f"data_type: {tensor.data_type}", f"dims: {_sizes(tensor.dims)}"]
    if note:
        lines[-1] += f"  # {note}"
    if tensor.reshape is not None:
        lines.append(f"reshape {{ shape: {_sizes(tensor.reshape.shape)} }}")
    lines += [f"{flag}: true" for flag in ("optional",) if getattr(tensor, flag, False)]
    return "".join(f"    {line}\n" for line in lines)


def _sizes(sizes: Any) -> str:
    return f"[ {', '.join(map(str, sizes))} ]" if sizes else "[ ]"
