"""Exposure of a running server: the areas that it answers to requests of a stranger.

The requests read, or have a malformed body, so they change nothing. They name a client behind a
proxy: the server treats them as those of another machine.
"""

import http.client
import ssl
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import SplitResult

from gateway.policy.areas import Area
from gateway.tools.doctor.report import Finding, Health

LIMIT_SECS = 5.0
"""Time limit of one response."""
METRICS_PORT = 8002
HEADERS = {"Forwarded": "for=unknown", "Content-Type": "application/json"}
MALFORMED = b"{"
NO_NAME = "sluice-doctor"
"""The name of no model and no region."""


class Openness(Enum):
    """The answer to a request without a key; one that is none of the others is UNKNOWN."""

    OPEN = "open"
    KEY = "key"
    SHUT = "shut"
    UNKNOWN = "unknown"


REFUSALS: Mapping[int, Openness] = {
    HTTPStatus.UNAUTHORIZED: Openness.KEY,
    HTTPStatus.FORBIDDEN: Openness.SHUT,
    HTTPStatus.NOT_FOUND: Openness.SHUT,
    HTTPStatus.METHOD_NOT_ALLOWED: Openness.SHUT,
    HTTPStatus.NOT_IMPLEMENTED: Openness.SHUT,
}


class Probe(NamedTuple):
    """A request, and its status where the area is open to it."""

    method: str
    path: str
    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b""


LIVE = Probe("GET", "/v2/health/live")


def _change(path: str) -> Probe:
    # Triton's status of a malformed body, which is read once the caller may change the server.
    return Probe("POST", path, HTTPStatus.INTERNAL_SERVER_ERROR, MALFORMED)


READS: Mapping[Area, Probe] = {
    Area.METADATA: Probe("GET", "/v2"),
    Area.INFERENCE: Probe("POST", "/v1/completions", HTTPStatus.BAD_REQUEST, MALFORMED),
    Area.SHARED_MEMORY: Probe("GET", "/v2/systemsharedmemory/status"),
    Area.MODEL_CONFIG: Probe("GET", f"/v2/models/{NO_NAME}/config", HTTPStatus.NOT_FOUND),
    Area.MODEL_REPOSITORY: Probe("POST", "/v2/repository/index"),
    Area.STATISTICS: Probe("GET", "/v2/models/stats"),
    Area.TRACE: Probe("GET", "/v2/trace/setting"),
    Area.LOGGING: Probe("GET", "/v2/logging"),
    Area.PLAYGROUND: Probe("GET", "/"),
    Area.ADMIN: Probe("GET", "/admin/tenants"),
}
"""A request of each area but metrics, and health, which is always answered."""
METRICS = Probe("GET", "/metrics")
CHANGES: Mapping[Area, Probe] = {
    Area.SHARED_MEMORY: _change(f"/v2/systemsharedmemory/region/{NO_NAME}/register"),
    Area.MODEL_REPOSITORY: _change(f"/v2/repository/models/{NO_NAME}/load"),
    Area.TRACE: _change("/v2/trace/setting"),
    Area.LOGGING: _change("/v2/logging"),
}
"""A change of each area that has some."""

READ_FIX = "if strangers reach it: sluice serve --public lists the options that close it"
CHANGE_FIX = "--open-control=false, or --api-keys FILE"
UNKNOWN_FIX = "again once the server is ready and not overloaded"


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a port; it is `shown` in findings."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def of(cls, url: SplitResult) -> "Place":
        """That of a URL with a host."""
        tls = url.scheme == "https"
        return cls(url.hostname or "", url.port or (443 if tls else 80), tls)

    @property
    def shown(self) -> str:
        """The address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"


def findings(server: Place, metrics: Place | None = None) -> Iterator[Finding]:
    """The areas that strangers may read and change; the metrics page is by default at 8002."""
    found = _reached(server)
    if found is None:
        yield Finding(server.shown, "no answer; --url URL examines another server")
        return
    reads = {area: _answer(found, probe) for area, probe in READS.items()}
    reads[Area.METRICS] = _metrics(metrics or replace(found, port=METRICS_PORT))
    yield from described(found.shown, reads, _changes(found))


def described(
    name: str, reads: Mapping[Area, Openness], changes: Mapping[Area, Openness]
) -> Iterator[Finding]:
    """The findings on the server with that name, by the answers of each area."""
    read, changed = _with(reads, Openness.OPEN), _with(changes, Openness.OPEN)
    unknown = {*_with(reads, Openness.UNKNOWN), *_with(changes, Openness.UNKNOWN)}
    keyed = []
    if reads[Area.INFERENCE] is Openness.KEY:
        keyed.append("inference")
    if with_key := _with(changes, Openness.KEY):
        keyed.append(f"changes of {', '.join(with_key)}")
    ends = [f"{' and '.join(keyed)} with a key"] if keyed else []
    if not (read or changed or unknown):
        ends.append("nothing else")
    if ends:
        yield Finding(name, "; ".join(ends))
    if read:
        yield Finding(f"{name}: read by all", ", ".join(read), Health.WARNING, READ_FIX)
    if changed:
        yield Finding(f"{name}: changed by all", ", ".join(changed), Health.WARNING, CHANGE_FIX)
    if unknown:
        areas = ", ".join(area for area in Area if area in unknown)
        yield Finding(f"{name}: not examined", areas, Health.WARNING, UNKNOWN_FIX)


def _metrics(page: Place) -> Openness:
    """The answer of the metrics page; a server may have none."""
    return Openness.SHUT if _status(page, METRICS) is None else _answer(page, METRICS)


def _changes(place: Place) -> Mapping[Area, Openness]:
    """The answers to changes.

    Where only another port has them, there is no route of loads; the paths with settings ask for
    the key of those that read.
    """
    if _status(place, CHANGES[Area.MODEL_REPOSITORY]) == HTTPStatus.NOT_FOUND:
        return dict.fromkeys(CHANGES, Openness.SHUT)
    return {area: _answer(place, probe) for area, probe in CHANGES.items()}


def _with(answers: Mapping[Area, Openness], wanted: Openness) -> Collection[Area]:
    return [area for area, answer in answers.items() if answer is wanted]


def _reached(server: Place) -> Place | None:
    """The place with or without TLS, as an inference server has it; None without one."""
    for place in (server, replace(server, tls=True)):
        # A server with TLS answers 400 without.
        if _status(place, LIVE) == HTTPStatus.OK:
            return place
    return None


def _answer(place: Place, probe: Probe) -> Openness:
    status = _status(place, probe)
    if status == probe.status:
        return Openness.OPEN
    return Openness.UNKNOWN if status is None else REFUSALS.get(status, Openness.UNKNOWN)


def _status(place: Place, probe: Probe) -> int | None:
    """The status of the response; None without one."""
    try:
        with closing(_connection(place)) as connection:
            connection.request(probe.method, probe.path, probe.body, HEADERS)
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None


def _connection(place: Place) -> http.client.HTTPConnection:
    if not place.tls:
        return http.client.HTTPConnection(place.host, place.port, timeout=LIMIT_SECS)
    # No secret is sent, so the certificate need not be that of a known authority.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(place.host, place.port, timeout=LIMIT_SECS, context=context)
