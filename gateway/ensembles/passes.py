"""Which steps are due, now that these tensors are there? One pass through an ensemble's graph."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.ensembles.graph import Plan, Step
from gateway.messages import SequenceTag
from gateway.tensor import Tensor

Origin = TypeVar("Origin")

NO_SEQUENCE = SequenceTag(0)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the ensemble, None if there is none: it was optional, or nobody made it.

    `rows` is the batch size of the request that made it, 0 if that had no batch dimension. `tag`
    is what the response said of the sequence; None for an input of the ensemble.
    """

    tensor: Tensor | None
    rows: int = 0
    tag: SequenceTag | None = None


class Pass(Generic[Origin]):
    """The tensors that are there so far.

    Each response of a decoupled step begins a pass of its own: what follows from it needs nothing
    else (that is checked when the ensemble is loaded). `origin` is the call that it came from, the
    first pass has none; `open` counts calls within it that, or whose passes, have not ended.
    """

    __slots__ = ("_missing", "_plan", "_unmade", "open", "origin", "values")

    def __init__(self, plan: Plan, origin: Origin | None = None) -> None:
        self.values: dict[str, Value] = {}
        self.origin = origin
        self.open = 0
        self._plan = plan
        self._missing: dict[Step, int] = {}
        self._unmade = len(plan.outputs)

    @property
    def complete(self) -> bool:
        """Whether every output that was asked for is there."""
        return not self._unmade

    def add(self, found: Iterable[tuple[str, Value]]) -> list[Step]:
        """Take tensors, each once; the steps that are due with them."""
        due = []
        for name, value in found:
            self.values[name] = value
            self._unmade -= name in self._plan.wanted
            for step in self._plan.readers.get(name, ()):
                missing = self._missing.get(step, self._plan.reads[step]) - 1
                self._missing[step] = missing
                if not missing:
                    due.append(step)
        return due
