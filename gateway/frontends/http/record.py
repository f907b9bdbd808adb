"""Route that records requests of clients as golden requests, one a line."""

import asyncio
import re
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, exiting
from gateway.frontends.http.audit import note_change
from gateway.frontends.http.body import collect, off_loop
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.keep_alive import SilenceFiller
from gateway.frontends.http.request_scope import (
    MODEL,
    VERSION,
    OnDisconnect,
    addressed,
    caller_in,
    piece_sender,
    piece_writer,
)
from gateway.rollouts.golden_recorder import (
    MOST_REQUESTS,
    MOST_SECS,
    GoldenRecorder,
    RecordingLimits,
)
from gateway.settings import HttpSettings
from gateway.strict_json import StrictObject, parse, refuse, shown
from gateway.tensor import Buffer

NDJSON = "application/x-ndjson"
NOT_ALLOWED = "requests of clients are not recorded; start the server with --allow-record=true"
COUNT, SECS = 20, 600.0
"""Defaults of `count` and `secs`."""
COUNTS_SECS = 1.0
"""Interval of lines with the counts only."""
LONGEST_PATTERN = 1000
"""Characters of `redact`."""
MOST_BODY_BYTES = 16 << 10


class RecordRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/record`."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._is_allowed = settings.allow_record

    def routes(self) -> list[DocumentedRoute]:
        """The routes, with and without a version."""
        return [DocumentedRoute("POST", f"{path}/record", self.record) for path in (MODEL, VERSION)]

    async def record(self, request: Request) -> Response:
        """Record requests of clients as golden requests, a line of JSON for each (NDJSON).

        The members of the body are `count`, `secs` and `redact`, a pattern. Lines without `golden`
        have the counts so far; the last one has `end`, the reason.
        """
        dataplane = self._dataplane
        if dataplane.exiting:
            raise exiting()
        if not self._is_allowed:
            raise InferenceError(Code.UNSUPPORTED, NOT_ALLOWED)
        limits = _limits(await collect(request.receive, _check_size))
        if limits.redact:
            await off_loop(dataplane.threads, request.scope, _check_pattern, limits.redact)
        about = {"count": limits.count, "secs": limits.secs, "redacted": bool(limits.redact)}
        note_change(request.scope, about)
        model = dataplane.model(*addressed(request, dataplane), caller_in(request.scope))
        return RecordedLines(GoldenRecorder(model, limits, dataplane.threads))


class RecordedLines(Response):
    """Sends the lines of a recorder, which it owns: a recording ends with its client."""

    def __init__(self, recorder: GoldenRecorder) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self.init_headers({"content-type": NDJSON, "cache-control": "no-store"})
        self._recorder = recorder
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._recorder as recorder, OnDisconnect(scope, self._disconnected):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            put, time = piece_sender(scope, send), asyncio.get_running_loop().time
            await put(recorder.counts())
            self._sent_at = time()
            filler = SilenceFiller(
                *(put, piece_writer(scope), COUNTS_SECS, lambda: self._sent_at, recorder.counts)
            )
            with filler:
                while (line := await recorder.next()) is not None:
                    await put(line)
                    self._sent_at = time()
            await send({"type": "http.response.body", "body": recorder.counts()})

    def _disconnected(self) -> None:
        self._recorder.end("the client has disconnected")


def _check_size(size: int) -> None:
    if size > MOST_BODY_BYTES:
        text = f"the body has more than {MOST_BODY_BYTES} bytes; send 'count', 'secs' and 'redact'"
        raise InferenceError(Code.INVALID_ARG, text)


def _limits(body: Buffer) -> RecordingLimits:
    """The limits in a body, which may be empty; InferenceError INVALID_ARG."""
    given = StrictObject(parse(bytes(body).strip() or b"{}"))
    count = given.number("count", COUNT, 1, MOST_REQUESTS)
    if not count.is_integer():
        given.refuse("count", count, "a whole number")
    secs, redact = given.number("secs", SECS, 0.1, MOST_SECS), given.text("redact", "")
    given.end("count", "secs", "redact")
    if len(redact) > LONGEST_PATTERN:
        refuse("redact", f"has {len(redact)} characters, expected at most {LONGEST_PATTERN}")
    return RecordingLimits(count=int(count), secs=secs, redact=redact)


def _check_pattern(pattern: str) -> None:
    """Raise INVALID_ARG for a pattern that is none; blocks: some short ones take seconds."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        refuse("redact", f"is {shown(pattern)}, expected a regular expression: {error}")
