"""A call that one request to an ensemble makes of a member."""

import time

from gateway.ensembles.passes import NO_SEQUENCE, Pass
from gateway.ensembles.steps import Stage
from gateway.messages import InferRequest, Phases
from gateway.stream import ResponseStream

MAX_PASSES = 64
"""Responses of one call that may be on their way at once; then its member is held back."""


class Call:
    """A step that is running within a pass.

    `tag` is the place in its sequence that the request has, `rows` its batch size. `passes` have
    begun with its responses and not ended; `parked` counts steps in them that wait at a gate.
    """

    __slots__ = (
        "_began_ns",
        "answered",
        "held_back",
        "noted",
        "parked",
        "passes",
        "phases",
        "rows",
        "stage",
        "stream",
        "tag",
        "within",
    )

    def __init__(
        self,
        stage: Stage,
        within: "Pass[Call]",
        request: InferRequest,
        stream: ResponseStream,
    ) -> None:
        self.stage = stage
        self.within = within
        self.stream = stream
        self.rows = stage.requests.rows(request)
        self.tag = request.sequence or NO_SEQUENCE
        self.answered = False
        self.noted = False
        self.held_back = False
        self.passes = 0
        self.parked = 0
        self.phases: Phases | None = None
        self._began_ns = time.perf_counter_ns()

    @property
    def full(self) -> bool:
        """Whether what it has answered must get on before it may answer more."""
        return self.parked > 0 or self.passes >= MAX_PASSES

    def spent(self) -> Phases:
        """The phases of its execution; all of its time if the member does not measure them."""
        return self.phases or Phases(infer_ns=time.perf_counter_ns() - self._began_ns)
