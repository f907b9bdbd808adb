"""Replicas of a fleet on Ray, as the controller sees them."""

import re
from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

import msgspec

PATHS = re.compile(
    r"""(["'`])(?:[A-Za-z][\w+.-]*:)?~?/.*?\1(?!\w)"""
    r"""|(?:(?<![\w)])|(?<=(?<!\w)-[A-Za-z]))~?/\S*[^\s"'`)\]},;:.]"""
)
"""Absolute paths, which may have spaces within quotes, and stand behind an option of one letter.

Also those of URLs.
"""
HIDDEN = "(a path)"


class ReplicaPhase(StrEnum):
    """The phase of a replica, in the order in which replicas are ended when fewer are wanted."""

    INFEASIBLE = "INFEASIBLE"  # no node could ever have a place for it
    PENDING = "PENDING"  # no node has a place for it now
    STARTING = "STARTING"
    READY = "READY"
    SILENT = "SILENT"  # it does not answer; Ray decides whether it is lost
    DRAINING = "DRAINING"
    ENDED = "ENDED"


PHASES = list(ReplicaPhase)
WORKING = frozenset({ReplicaPhase.READY, ReplicaPhase.SILENT})
WITHOUT_PLACE = frozenset({ReplicaPhase.INFEASIBLE, ReplicaPhase.PENDING})
NOT_READY = WITHOUT_PLACE | {ReplicaPhase.STARTING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica as the controller sees it: `need` is its share, `reason` that of its phase.

    The reason may have paths, and lines of a log: clients get what `for_clients` leaves.

    `description` is that of the model when the replica was made. The workers of its engine may be
    on `further_nodes`, too.
    """

    name: str
    model: str
    phase: ReplicaPhase
    description: str = ""
    node: str = ""
    further_nodes: Set[str] = frozenset()
    host: str = ""
    port: int = 0
    need: float = 0.0
    reason: str = ""

    def is_on(self, nodes: Set[str]) -> bool:
        """Whether it, or a worker of its engine, is on one of these nodes."""
        return self.node in nodes or not nodes.isdisjoint(self.further_nodes)


def for_clients(reason: str) -> str:
    """The first line of a reason without paths; the log and the status have the whole."""
    return PATHS.sub(HIDDEN, reason.partition("\n")[0])


read_view = msgspec.json.Decoder(ReplicaView).decode
