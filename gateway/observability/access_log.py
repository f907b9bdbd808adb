"""The access log: a line of JSON for each request of a client, finished or refused."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from gateway.errors import InferenceError
from gateway.json_lines import JsonLinesFile
from gateway.messages import InferRequest, InferResponse, StreamRecorder
from gateway.observability.request_context import LoggedRequest, current_request
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import StreamTap, Tap
from gateway.observability.traceparent import read_parent
from gateway.settings import LogFormat, Settings

MOST_LINES = 10_000
"""Lines that wait for the disk; further ones are dropped."""

log = logging.getLogger("sluice.access")


class ModelVersion(Protocol):
    """The model that serves a request."""

    name: str
    version: str


class AccessLog:
    """Notes the requests of clients while they are served, and `writes` their lines to a file.

    Without a file the requests are noted for the lines of the process' own log. No line has a key,
    a prompt, a path or a query: their texts are those of the tables of routes and keys, the id of
    the request and the address of the client.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else JsonLinesFile(path, "access log", log, MOST_LINES)

    @property
    def writes(self) -> bool:
        """Whether it has a file."""
        return self._file is not None

    @property
    def dropped(self) -> int | None:
        """Lines that are lost: the disk was full, or too slow; None without a file."""
        return None if self._file is None else self._file.failures

    def open(self) -> None:
        """Open the file, and begin to write; OSError if it cannot be opened."""
        if self._file is not None:
            self._file.open()

    def close(self) -> None:
        """Write the last lines, and close the file."""
        if self._file is not None:
            self._file.close()

    def request(
        self, wire: str, route: str, method: str, peer: str, parents: Sequence[str]
    ) -> LoggedRequest:
        """A request that has arrived; `parents` are the values of its header `traceparent`."""
        found = LoggedRequest(self, wire, route, method, peer)
        if parents and (parent := read_parent(parents)):
            found.belongs(parent.trace_id, parent.span_id)
        return found

    def ended(self, request: LoggedRequest) -> None:
        """Add the line of a request."""
        if self._file is not None:
            now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            self._file.add({"time": now, **request.members()})

    def tap(self, request: InferRequest, model: ModelVersion, tap: Tap | None) -> Tap | None:
        """Note what the current request asks; the tap that notes its errors, around another."""
        found = current_request()
        if found is None:
            return tap
        found.model, found.version, found.id = model.name, model.version, request.id
        found.caller = request.caller
        found.waits(request.deadline)
        return NotedErrors(found, tap) if self._file is not None else tap


class NotedErrors(StreamTap):
    """Notes the record and the errors of a request."""

    __slots__ = ("_request",)

    def __init__(self, request: LoggedRequest, tap: Tap | None) -> None:
        super().__init__(tap)
        self._request = request

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        self._request.records.append(record)
        return super().recorder(record, account)

    def responded(self, response: InferResponse) -> None:
        """Note the error of a response."""
        if response.error is not None:
            self._request.note(response.error)
        self.account.responded(response)

    def ended(self, error: InferenceError | None) -> None:
        """Note the error."""
        if error is not None:
            self._request.note(error)
        self.account.ended(error)


def access_log_of(settings: Settings) -> AccessLog | None:
    """The access log of a server; lines of a log in JSON need it, too."""
    if settings.access_log is None and settings.log.format is not LogFormat.JSON:
        return None
    return AccessLog(settings.access_log)
