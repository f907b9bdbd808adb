"""The values that travel between frontends and backends: requests and responses."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from gateway.errors import InferenceError
from gateway.tensor import Tensor
from gateway.value import keyword_value, value

Parameter = bool | int | float | str
"""A parameter as the v2 protocol has them."""

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


def _no_parameters() -> Mapping[str, Any]:
    return NO_PARAMETERS


@value
class SharedRegion:
    """A part of a registered shared memory region; offset and size in bytes.

    `memory` is the region itself once it has been located, so that the part outlives the name.
    """

    name: str
    byte_size: int
    offset: int = 0
    memory: object | None = field(default=None, compare=False, repr=False)


@value
class RequestedOutput:
    """An output asked for by name.

    `classes` > 0 asks for the classification extension, `region` for the data in shared memory.
    """

    name: str
    classes: int = 0
    region: SharedRegion | None = None


def asked_once(outputs: Sequence[RequestedOutput]) -> tuple[RequestedOutput, ...]:
    """The outputs without repetition, as Triton serves them.

    Of those with one name the first with a form of its own counts, else the first.
    """
    found: dict[str, RequestedOutput] = {}
    for each in outputs:
        known = found.setdefault(each.name, each)
        if not (known.classes or known.region):
            found[each.name] = each
    return tuple(found.values())


@value
class SequenceTag:
    """Where a request stands in its sequence. `correlation_id` 0 or "" means no sequence."""

    correlation_id: int | str
    start: bool = False
    end: bool = False


class Lineage(Protocol):
    """The trace of a request, as far as requests that it leads to must know it."""

    def child(self) -> Self:
        """The trace of a request that is made on behalf of this one."""


class Checked(NamedTuple):
    """That `rules` have found a request to be one of that batch size."""

    rules: object
    batch_size: int


@keyword_value
class InferRequest:
    """One request.

    `version` "" asks for the highest ready version. `parameters` are the client's own: strings,
    numbers and booleans; LLM models may also get JSON arrays and objects over HTTP generate.
    `timeout_us` and `priority` 0 mean the model's default. `received_ns` is when its first byte
    was handled (`time.perf_counter_ns`), 0 if the frontend did not say. `trace` is the request's
    own once its model has taken it; before that, the one of the request on whose behalf it is made.
    `checked` is the result of a check that came before, which its model need not repeat.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=_no_parameters)
    sequence: SequenceTag | None = None
    priority: int = 0
    timeout_us: int = 0
    received_ns: int = 0
    trace: Lineage | None = field(default=None, compare=False, repr=False)
    checked: Checked | None = field(default=None, compare=False, repr=False)

    def input(self, name: str) -> Tensor | None:
        """The input of that name, or None."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        return None


def request_prefix(request_id: str) -> str:
    """What Triton writes before most refusals of a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


@value
class Usage:
    """Tokens of one response: the request's prompt, and what this response adds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""


@value
class Phases:
    """How long the parts of an execution took, all in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


@keyword_value
class InferResponse:
    """One response; `final` says that no more will come for its request.

    A final response without outputs is only the flag (Triton's empty final response). `phases`
    are those of the execution it comes from, where the backend measures them. With an `error` it
    has no outputs, and more may follow: an error that ends its request is raised instead.
    `shared_bytes` is the memory of another process that its outputs lie in: few such responses may
    wait to be read.
    """

    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=_no_parameters)
    final: bool = False
    usage: Usage | None = None
    phases: Phases | None = None
    shared_bytes: int = 0
    error: InferenceError | None = None

    def output(self, name: str) -> Tensor | None:
        """The output of that name, or None."""
        for tensor in self.outputs:
            if tensor.name == name:
                return tensor
        return None
