"""The audit log: a line of JSON for each change of the server, made or refused."""

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.policy.areas import Area
from gateway.policy.caller import Caller

NEW_MODE = 0o600
MOST_LINES = 10_000
"""Lines that wait for the disk; further ones are dropped."""
REFUSALS_PER_SEC = 100
"""Refused changes of a second with a line; the next line has the number of the others."""
CLOSE_SECS = 2.0
"""Time for the last lines at the end of the server."""
MOST_CHARS = 512
MOST_MEMBERS = 32
"""The size of a text, and of a list or an object, in a line; the rest is left out."""
MAX_INTEGER = 2**64
OMITTED = "..."
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
    """Appends lines to a file, in the order of the changes, in a thread of its own.

    A file that is moved is created again (log rotation). A line that cannot be written is dropped
    and counted; the first one of a series is logged. Lines wait until `open`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self._dropped = self._unwritten = 0
        self._is_failing = self._is_torn = False
        self._second = self._refusals = self._omitted = 0
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Open the file, and begin to write; OSError if it cannot be opened."""
        self._descriptor = _opened(self._path)
        self._thread = threading.Thread(target=self._write_lines, name="audit", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Changes without a line: the disk was full, or too slow."""
        return self._dropped + self._unwritten

    def add(
        self, change: AuditedChange, result: str = OK, error: str = "", *, refused: bool = False
    ) -> None:
        """Add the line of a change; `refused` is one whose caller may not make it."""
        if refused and self._is_omitted():
            self._omitted += 1
            return
        members = {**change.members(), "result": result}
        if error:
            members["error"] = _short(error)
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
        try:
            self._lines.put_nowait(_line(whole))
            self._omitted = 0
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the last lines, and close the file, if it is open."""
        if self._thread is None:
            return
        if self._omitted:
            self._add({"action": "refusals"})
        try:
            self._lines.put(None, timeout=CLOSE_SECS)
        except queue.Full:
            log.error("audit log not completed", extra={"lines": self._lines.qsize()})
            return
        self._thread.join(CLOSE_SECS)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
                self._is_failing = False
            except OSError as error:
                self._note_failure(error)
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        if self._is_moved():
            opened, before = _opened(self._path), self._descriptor
            self._descriptor, self._is_torn = opened, False
            os.close(before)
        whole = rest = b"\n" + line if self._is_torn else line
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        finally:
            if len(rest) < len(whole):
                self._is_torn = bool(rest)

    def _is_moved(self) -> bool:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(found, os.fstat(self._descriptor))

    def _note_failure(self, error: OSError) -> None:
        self._unwritten += 1
        if not self._is_failing:
            self._is_failing = True
            about = {"file": str(self._path), "reason": error.strerror}
            log.error("audit log not written", extra=about)


def _opened(path: Path) -> int:
    """The file, made if it is missing; a pipe without a reader is refused and not waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    return os.open(path, flags, NEW_MODE)


def _line(members: Mapping[str, Any]) -> bytes:
    """ASCII without control characters, so that no text begins a line or controls a terminal."""
    return (json.dumps(members) + "\n").encode("ascii")


def _short(value: Any, depth: int = 3) -> Any:
    """A value for a line: texts and lists are cut, and values of other kinds are left out."""
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARS else value[:MOST_CHARS] + OMITTED
    if isinstance(value, Mapping) and depth:
        some = list(value.items())[:MOST_MEMBERS]
        return {_short(name): _short(each, depth - 1) for name, each in some}
    if isinstance(value, list | tuple) and depth:
        return [_short(each, depth - 1) for each in value[:MOST_MEMBERS]]
    if value is None or (isinstance(value, int) and abs(value) < MAX_INTEGER):
        return value
    return OMITTED
