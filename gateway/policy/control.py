"""The conditions of changes of the server, and of facts about others: this machine only."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from gateway.policy.areas import Area
from gateway.policy.caller import Caller, is_this_machine

CHANGES: Mapping[Area, str] = {
    Area.MODEL_REPOSITORY: "loading and unloading models",
    Area.SHARED_MEMORY: "registering shared memory",
    Area.TRACE: "changing trace settings",
    Area.LOGGING: "changing log settings",
}
"""The changes in each area that has some."""
CONTROLLED: Mapping[Area, str] = {**CHANGES, Area.ADMIN: "the state of tenants and requests"}
"""The requests under the conditions of changes."""


@dataclass(frozen=True, slots=True)
class ChangeControl:
    """Callers that may change the server: those of this machine, or all if it `is_open`.

    `hosts` are further names of this machine, in lower case.
    """

    is_open: bool = False
    hosts: frozenset[str] = frozenset()

    def refusal(self, area: Area, caller: Caller) -> str | None:
        """The text of the refusal of a request in CONTROLLED; None if it is answered."""
        if caller.foreign:
            what = "changes are" if area in CHANGES else f"{CONTROLLED[area]} is"
            return f"{what} not answered to pages of another origin, found {caller.foreign}"
        if self.is_open or caller.local:
            return None
        return (
            f"{CONTROLLED[area]} is answered to this machine only; --open-control=true answers "
            "every machine, as Triton does"
        )

    def opened(self) -> "ChangeControl":
        """The condition on a server with API keys, which decide on every machine."""
        return replace(self, is_open=True)

    def open_areas(self, address: str, restricted: Collection[Area]) -> Iterator[Area]:
        """The areas that other machines may change at a listener's address without a secret."""
        if self.is_open and not is_this_machine(address):
            yield from (area for area in CHANGES if area not in restricted)
