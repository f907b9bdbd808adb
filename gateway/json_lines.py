"""Files of JSON, an object a line, that a thread writes: the audit log and the access log."""

import json
import logging
import os
import queue
import re
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STDOUT = Path("-")
"""The path that means the standard output."""
NEW_MODE = 0o600
CLOSE_SECS = 2.0
"""Time for the last lines at the end of the server."""
WRITE_BYTES = 1 << 16
"""Bytes up to which lines are written at once; to a pipe, which may have others, one by one."""
MOST_CHARS = 512
"""The size of a text in a line; the rest is left out."""
OMITTED = "..."
SURROGATE = re.compile(r"\\ud[89a-f]")


def json_line(members: Mapping[str, Any]) -> bytes:
    """The line of an object: ASCII without control characters, for every JSON parser.

    So no text begins a line or controls a terminal. Strict parsers refuse half of a surrogate
    pair, as from a file name that is not UTF-8: `?` is in its place.
    """
    text = json.dumps(members)
    if SURROGATE.search(text):
        found = json.dumps(members, ensure_ascii=False).encode(errors="replace")
        text = json.dumps(json.loads(found))
    return text.encode("ascii") + b"\n"


def cut(text: str) -> str:
    """The first characters of a text that may be long."""
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + OMITTED


class JsonLinesFile:
    """Appends lines to a file, in the order of `add`, in a thread of its own.

    A file that is moved is created again (log rotation). A line that cannot be written is dropped
    and counted, as those beyond `most_lines` that wait; the first one of a series is logged with
    the `name` of the file. Lines wait until `open`. The path STDOUT is the standard output.
    """

    def __init__(self, path: Path, name: str, log: logging.Logger, most_lines: int) -> None:
        self._path = path
        self._name = name
        self._log = log
        self._descriptor = -1
        self._most_bytes = 1
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(most_lines)
        self._dropped = self._unwritten = 0
        self._is_failing = self._is_torn = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Open the file, and begin to write; OSError if it cannot be opened."""
        self._descriptor = _opened(self._path)
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self._most_bytes = WRITE_BYTES
        self._thread = threading.Thread(target=self._write_lines, name=self._name, daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Lines that are lost: the disk was full, or too slow, or they have no form in JSON."""
        return self._dropped + self._unwritten

    def add(self, members: Mapping[str, Any]) -> bool:
        """Add the line of an object, which nothing changes afterwards; False if it is dropped."""
        try:
            self._lines.put_nowait(members)
        except queue.Full:
            self._dropped += 1
            return False
        return True

    def close(self) -> None:
        """Write the last lines, and close the file, if it is open."""
        if self._thread is None:
            return
        try:
            self._lines.put(None, timeout=CLOSE_SECS)
        except queue.Full:
            self._log.error(f"{self._name} not completed", extra={"lines": self._lines.qsize()})
            return
        self._thread.join(CLOSE_SECS)

    def _write_lines(self) -> None:
        ended = False
        while not ended:
            waiting, ended = self._taken()
            if waiting:
                self._append(waiting)
        os.close(self._descriptor)

    def _taken(self) -> tuple[bytes, bool]:
        """Lines that wait, at least one, and whether the last one is among them."""
        found, members = b"", self._lines.get()
        while members is not None:
            found += self._encoded(members)
            if len(found) >= self._most_bytes:
                return found, False
            try:
                members = self._lines.get_nowait()
            except queue.Empty:
                return found, False
        return found, True

    def _encoded(self, members: Mapping[str, Any]) -> bytes:
        """The line of an object, none of one that has no form in JSON."""
        try:
            return json_line(members)
        except (TypeError, ValueError) as error:
            self._unwritten += 1
            self._note_failure(str(error))
            return b""

    def _append(self, lines: bytes) -> None:
        whole = rest = b"\n" + lines if self._is_torn else lines
        try:
            if self._is_moved():
                opened, before = _opened(self._path), self._descriptor
                self._descriptor, self._is_torn = opened, False
                os.close(before)
                whole = rest = lines
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._is_failing = False
        except OSError as error:
            self._unwritten += min(rest.count(b"\n"), lines.count(b"\n"))
            self._note_failure(error.strerror)
        if len(rest) < len(whole):
            self._is_torn = not whole[: len(whole) - len(rest)].endswith(b"\n")

    def _is_moved(self) -> bool:
        if self._path == STDOUT:
            return False
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(found, os.fstat(self._descriptor))

    def _note_failure(self, reason: str | None) -> None:
        if not self._is_failing:
            self._is_failing = True
            about = {"file": str(self._path), "reason": reason}
            self._log.error(f"{self._name} not written", extra=about)


def _opened(path: Path) -> int:
    """The file, made if it is missing; a pipe without a reader is refused and not waited for."""
    if path == STDOUT:
        return os.dup(1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    return os.open(path, flags, NEW_MODE)
