"""Requests of clients, and requests that model.py sends to other models."""

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from . import business_logic
from .errors import TritonModelException
from .open_requests import InferenceResponseSender, OpenRequest
from .response import checked, client_text, text
from .tensor import Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """The memory that holds the data of a tensor."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """The memory for outputs of a request to another model: a hint, which has no effect."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.memory_type = MemoryType(preferred_memory_type)
        self.device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request, to be shared with the requests that it causes."""

    __slots__ = ("_headers", "number")

    def __init__(self, number: int = 0, headers: dict[str, str] | None = None) -> None:
        self.number = number
        self._headers = headers

    def get_context(self) -> str | None:
        """The headers `traceparent` and `tracestate` of its span as JSON text.

        None for a request that is not traced in the mode opentelemetry.
        """
        return None if self._headers is None else text(self._headers)


class InferenceRequest:
    """A request of a client to this model, or of this model to another."""

    __slots__ = (
        *("__weakref__", "_correlation", "_flags", "_id", "_inputs", "_model", "_open"),
        *("_outputs", "_parameters", "_release", "_sender", "_timeout", "_trace", "_version"),
    )

    _open: OpenRequest | None
    _sender: InferenceResponseSender | None

    def __init__(  # noqa: PLR0913 - the arguments of Triton's API
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        _check_types(
            ("request_id", request_id, str),
            ("inputs", inputs, (list, tuple)),
            ("requested_output_names", requested_output_names, (list, tuple, set)),
            ("model_name", model_name, str),
            ("model_version", model_version, int),
            ("flags", flags, int),
            ("timeout", timeout, int),
            ("trace", trace, (InferenceTrace, type(None))),
        )
        self._id, self._model, self._version = request_id, str(model_name), model_version
        self._correlation = _correlation(correlation_id)
        self._inputs = list(inputs or ())
        self._outputs: Collection[str] = list(requested_output_names or ())
        self._flags, self._timeout = flags, timeout
        self._parameters = checked(parameters)
        self._trace = trace
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL
        self._open = self._sender = None
        self._check()

    @classmethod
    def received(
        cls, header: Sequence[Any], inputs: list[Tensor], request: OpenRequest, outputs: Any
    ) -> "InferenceRequest":
        """A request that has arrived; `outputs` are the requested names."""
        self = cls.__new__(cls)
        _, self._model, version, self._id, correlation, self._flags, self._timeout = header[:7]
        self._version = version
        self._correlation = 0 if correlation is None else correlation
        self._inputs, self._outputs = inputs, outputs
        self._parameters = header[8]
        self._trace = InferenceTrace(request.number, header[11]) if len(header) > 11 else None
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL
        self._open, self._sender = request, None
        return self

    def inputs(self) -> list[Tensor]:
        """The inputs."""
        return self._inputs

    def requested_output_names(self) -> set[str]:
        """Names of the requested outputs; all if the client named none."""
        return set(self._outputs)

    def request_id(self) -> str:
        """The client's id."""
        return self._id

    def correlation_id(self) -> int | str:
        """The id of its sequence."""
        return self._correlation

    def flags(self) -> int:
        """Whether a sequence starts or ends here."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set whether a sequence starts or ends here."""
        self._flags = int(flags)

    def timeout(self) -> int:
        """The client's timeout in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The client's parameters as JSON text."""
        return text(self._parameters) if self._open is None else client_text(self._parameters or {})

    def trace(self) -> InferenceTrace:
        """The trace for requests that this one causes."""
        if self._open is None:
            return InferenceTrace()
        return self._trace or InferenceTrace(self._open.number)

    def is_cancelled(self) -> bool:
        """Whether the request is cancelled."""
        return self._open is not None and self._open.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of this request; the same each time."""
        if self._sender is None:
            if self._open is None:
                raise TritonModelException("a request to another model has no response sender.")
            self._sender = InferenceResponseSender(self._open)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """RELEASE_ALL, or RELEASE_RESCHEDULE for another round of an iterative sequence."""
        self._release = int(flags)

    @property
    def rescheduled(self) -> bool:
        """Whether it is to be executed again."""
        return self._release == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    @property
    def open_request(self) -> OpenRequest:
        """The open request behind a request that has arrived."""
        if self._open is None:
            raise TritonModelException("this request has not come from a client.")
        return self._open

    def exec(self, decoupled: bool = False) -> Any:
        """Send it and wait; returns the response, or an iterator over the responses."""
        return business_logic.ask(self.header(), self._inputs, decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """Send it at once; returns an awaitable of the running loop."""
        return business_logic.ask_soon(self.header(), self._inputs, decoupled)

    def header(self) -> list[Any]:
        """The request as the header of a message, without its inputs."""
        version = "" if self._version == -1 else str(self._version)
        return [
            0 if self._trace is None else self._trace.number,
            *(self._model, version, self._id, self._correlation or None, self._flags),
            *(self._timeout, 0, self._parameters or {}, list(self._outputs)),
        ]

    def _check(self) -> None:
        where = f"for request with id '{self._id}' and model name '{self._model}'"
        if any(each is None for each in self._inputs):
            raise TritonModelException(f"Input tensor {where} should not be empty.")
        _check_types(*[("Tensors in inputs", each, Tensor) for each in self._inputs])
        _check_types(*[("texts in requested_output_names", each, str) for each in self._outputs])
        if not 0 <= self._timeout < 1 << 64:
            raise TypeError(f"timeout must be microseconds in 64 bits, found {self._timeout}")
        if not all(self._outputs):
            raise TritonModelException(f"Requested output name {where} should not be empty.")


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """An input by its name; None if it was not sent."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def _correlation(given: Any) -> int | str:
    if given is None:
        raise TypeError(f"InferenceRequest needs correlation_id, found {type(given)}")
    if isinstance(given, str) or (isinstance(given, int) and 0 <= given < 1 << 64):
        return given
    raise TritonModelException("Correlation ID must be integer or string")


def _check_types(*arguments: tuple[str, Any, Any]) -> None:
    for name, value, kind in arguments:
        if not isinstance(value, kind):
            raise TypeError(f"InferenceRequest needs {name}, found {type(value)}")
