"""Checks of requests for a sequence batcher, with Triton's order and texts."""

from collections.abc import Callable
from typing import NoReturn

from gateway.config import ModelConfig
from gateway.config.scheduling import ControlKind
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag, request_prefix
from gateway.sequences.inputs import controls_of
from gateway.tensor import Datatype


class SequenceAdmission:
    """The checks of one model; `known` says whether a sequence is open."""

    def __init__(self, config: ModelConfig, known: Callable[[int | str], bool]) -> None:
        batching = config.sequence_batching
        self._model = config.name
        self._batching = config.batching
        self._iterative = batching is not None and batching.iterative_sequence
        self._known = known
        self._ids = [
            (name, control.data_type.datatype)
            for name, control in controls_of(config)
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID
        ]

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG if the request cannot belong to a sequence."""
        tag = request.sequence
        if tag is not None:
            self._check_type(tag, request)
        if self._batching and request.inputs and request.inputs[0].shape[0] > 1:
            _refuse(
                f"inference request to model '{self._model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if tag is None or not tag.correlation_id:
            if not self._iterative:
                _refuse(
                    f"inference request to model '{self._model}' must specify a non-zero or "
                    "non-empty correlation ID"
                )
        elif not tag.start and not self._known(tag.correlation_id):
            raise self.not_started(tag.correlation_id)

    def not_started(self, correlation_id: int | str) -> InferenceError:
        """The error of a request whose sequence is not open."""
        return InferenceError(
            Code.INVALID_ARG,
            f"inference request for sequence {correlation_id} to model '{self._model}' must "
            "specify the START flag on the first request of the sequence",
        )

    def _check_type(self, tag: SequenceTag, request: InferRequest) -> None:
        found = Datatype.BYTES if isinstance(tag.correlation_id, str) else Datatype.UINT64
        for name, expected in self._ids:
            if (found is Datatype.BYTES) is not (expected is Datatype.BYTES):
                _refuse(
                    f"{request_prefix(request.id)}sequence batching control '{name}' data-type is "
                    f"'{found}', but model '{self._model}' expects '{expected}'"
                )


def _refuse(message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, message)
