"""What do a sequence's control inputs tell the model about each of its requests?"""

import struct
from collections.abc import Iterator
from itertools import product

from gateway.batches.sequence_tensors import control_type
from gateway.config import ModelConfig
from gateway.config.scheduling import Control, ControlKind
from gateway.messages import SequenceTag
from gateway.tensor import SIZES, Datatype, Tensor

NOBODY = SequenceTag(0)


class Controls:
    """The control tensors of one model (`ModelSequenceBatching.control_input`).

    Each has shape [1], behind a batch of one if the model batches.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.batching else (1,)
        self._flags: dict[tuple[bool, bool, bool], tuple[Tensor, ...]] = {}
        self._ids: list[tuple[str, Datatype]] = []
        signals: list[tuple[str, Control]] = []
        for name, control in controls_of(config):
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                self._ids.append((name, control.data_type.datatype))
            else:
                signals.append((name, control))
        for start, end, ready in product((False, True), repeat=3):
            flags = (start, end, ready)
            self._flags[flags] = tuple([self._signal(*each, flags) for each in signals])

    def of(self, tag: SequenceTag) -> tuple[Tensor, ...]:
        """The tensors for a request of a sequence."""
        return self._flags[tag.start, tag.end, True] + self._id_tensors(tag.correlation_id)

    def of_nobody(self) -> tuple[Tensor, ...]:
        """The tensors for a slot that has no request."""
        return self._flags[False, False, False] + self._id_tensors(0)

    def _signal(self, name: str, control: Control, flags: tuple[bool, bool, bool]) -> Tensor:
        datatype = control_type(control).datatype
        return Tensor(name, datatype, self._shape, _value(control, flags[_PLACES[control.kind]]))

    def _id_tensors(self, correlation_id: int | str) -> tuple[Tensor, ...]:
        return tuple(
            [
                Tensor(name, datatype, self._shape, _id_data(datatype, correlation_id))
                for name, datatype in self._ids
            ]
        )


_PLACES = {
    ControlKind.CONTROL_SEQUENCE_START: 0,
    ControlKind.CONTROL_SEQUENCE_END: 1,
    ControlKind.CONTROL_SEQUENCE_READY: 2,
}


def controls_of(config: ModelConfig) -> Iterator[tuple[str, Control]]:
    """Each control of the model with the name of its tensor."""
    batching = config.sequence_batching
    for each in batching.control_input if batching else ():
        for control in each.control:
            yield each.name, control


def _value(control: Control, truth: bool) -> bytes:
    if control.int32_false_true:
        return struct.pack("<i", control.int32_false_true[truth])
    if control.fp32_false_true:
        return struct.pack("<f", control.fp32_false_true[truth])
    return struct.pack("<?", control.bool_false_true[truth])


def _id_data(datatype: Datatype, correlation_id: int | str) -> bytes | tuple[bytes, ...]:
    """The id as the tensor holds it: of numbers that are too long the low bytes, as in Triton."""
    if datatype is Datatype.BYTES:
        return (str(correlation_id or "").encode("utf-8", "surrogatepass"),)
    size: int = SIZES[datatype]
    return (int(correlation_id) % (1 << 8 * size)).to_bytes(size, "little")
