"""The audit log: a line of JSON for each change of the server, made or refused."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.json_lines import OMITTED, JsonLinesFile, cut
from gateway.policy.areas import Area
from gateway.policy.caller import Caller

MOST_LINES = 10_000
"""Lines that wait for the disk; further ones are dropped."""
REFUSALS_PER_SEC = 100
"""Refused changes of a second with a line; the next line has the number of the others."""
MOST_MEMBERS = 32
"""The size of a list or an object in a line; the rest is left out, as that of a long text."""
MAX_INTEGER = 2**64
ACTION = re.compile(r"((un)?(load|register)|labels|record|rollout/\w+|change)$", re.IGNORECASE)
OK = "ok"
ABORTED = "aborted"
"""The result of a change without an answer: the change itself may have been made."""

log = logging.getLogger("sluice.audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedChange:
    """A change: `by` a client, the server itself, a model or the program; `about` is its object.

    `route` is the path of the route or method, `caller` the sender of a request with an API key.
    """

    area: Area
    action: str
    by: str
    about: Mapping[str, Any] = field(default_factory=dict)
    wire: str = ""
    route: str = ""
    address: str = ""
    caller: Caller | None = None

    def members(self) -> dict[str, Any]:
        """The members of the line; those of a client's request only for its changes."""
        found: dict[str, Any] = {"by": self.by}
        if self.wire:
            found |= {"wire": self.wire, "route": self.route, "address": self.address}
        if self.caller is not None:
            found |= {"tenant": self.caller.tenant, "key": self.caller.key_id}
        return {"area": self.area, "action": self.action, **_short(self.about), **found}


def action_of(route: str) -> str:
    """The action of a route or method that changes: `load`, `rollout-pause`, else `settings`."""
    found = ACTION.search(route)
    return found[0].lower().replace("/", "-") if found else "settings"


class AuditLog:
    """Appends lines to a file, in the order of the changes; see `JsonLinesFile`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path, "audit log", log, MOST_LINES)
        self.open = self._file.open
        self._second = self._refusals = self._omitted = 0

    @property
    def failures(self) -> int:
        """The number of changes without a line, since the disk was full or too slow."""
        return self._file.failures

    def add(
        self, change: AuditedChange, result: str = OK, error: str = "", *, refused: bool = False
    ) -> None:
        """Add the line of a change; `refused` is one whose caller may not make it."""
        if refused and self._is_omitted():
            self._omitted += 1
            return
        members = {**change.members(), "result": result}
        if error:
            members["error"] = cut(error)
        self._add(members)

    def _is_omitted(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        return self._refusals > REFUSALS_PER_SEC

    def _add(self, members: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        whole = {"time": now, **members}
        if self._omitted:
            whole["omitted"] = self._omitted
        if self._file.add(whole):
            self._omitted = 0

    def close(self) -> None:
        """Write the last lines, and close the file, if it is open."""
        if self._omitted:
            self._add({"action": "refusals"})
        self._file.close()


def _short(value: Any, depth: int = 3) -> Any:
    """A value for a line: texts and lists are cut, and values of other kinds are left out."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, Mapping) and depth:
        some = list(value.items())[:MOST_MEMBERS]
        return {_short(name): _short(each, depth - 1) for name, each in some}
    if isinstance(value, list | tuple) and depth:
        return [_short(each, depth - 1) for each in value[:MOST_MEMBERS]]
    if value is None or (isinstance(value, int) and abs(value) < MAX_INTEGER):
        return value
    return OMITTED
