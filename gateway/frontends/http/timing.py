"""Receipts of requests over HTTP: the wish for one, and its forms in answers."""

import time
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.frontends.http.infer_response import WholeAnswer
from gateway.frontends.http.request_scope import OK, SendPiece, begun_at
from gateway.messages import InferRequest
from gateway.observability.receipt import HEADER, SERVER_TIMING, TIMING, WISHED, Receipt
from gateway.observability.receipts import Receipts

RECEIPT = "sluice.receipt"
"""The key of a request's receipt in its scope; absent without one."""
WISH = (HEADER.encode(), WISHED.encode())
NAME = SERVER_TIMING.encode()


def wishes(scope: Scope) -> bool:
    """Whether the head of a request asks for its receipt."""
    return WISH in scope["headers"]


def begin_receipt(
    scope: Scope,
    receipts: Receipts,
    request: InferRequest,
    whole_ns: int,
    *,
    wished: bool = False,
) -> InferRequest:
    """The request for the model, with a receipt if one is wished for; the scope has it, too."""
    begun_ns = begun_at(scope, request)
    found = receipts.begin(request, begun_ns, whole_ns, wished=wished or wishes(scope))
    if found.receipt is not None:
        scope[RECEIPT] = found.receipt
    return found


def timing_header(receipt: Receipt) -> tuple[bytes, bytes]:
    """The header of an answer, with the parts up to now."""
    return NAME, receipt.header().encode()


def timed(response: Response, receipt: Receipt) -> Response:
    """The whole response with its receipt, which ends when the response is sent."""
    return TimedResponse(response, receipt)


def with_timing(json: bytes, receipt: Receipt) -> bytes:
    """An object of JSON with a further member, the receipt up to now; others are unchanged."""
    members = json.rstrip().removesuffix(b"}")
    if len(members) == len(json.rstrip()) or not members.strip(b"{ \t\r\n"):
        return json
    receipt.told = True
    return b'%b,"%b":%b}' % (members, TIMING.encode(), receipt.json())


def timing_comment(receipt: Receipt) -> bytes:
    """The comment of a stream of events with the receipt, unless the last event has had it."""
    if receipt.told:
        return b""
    return b": %b %b\n\n" % timing_header(receipt)


def stalling(put: SendPiece, receipt: Receipt) -> SendPiece:
    """A sender of pieces of an answer that notes its waits for the client."""

    async def put_and_note(piece: bytes) -> None:
        since_ns = time.perf_counter_ns()
        await put(piece)
        receipt.stalled(since_ns)

    return put_and_note


class TimedResponse(Response):
    """A whole response with its receipt.

    The parts are those up to the time at which it is sent, in one piece if it is a success: a
    client that gets the head alone may take the processor from the server before the body.
    """

    def __init__(self, response: Response, receipt: Receipt) -> None:
        self.status_code, self.body = response.status_code, response.body
        self.raw_headers = response.raw_headers
        self.background = None
        self._receipt = receipt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.raw_headers.append(timing_header(self._receipt))
        is_whole = self.status_code == OK
        answer = WholeAnswer(self.raw_headers, [self.body]) if is_whole else super().__call__
        await SendingApp(answer, self._receipt)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class SendingApp:
    """An answer whose receipt ends when it is sent."""

    answer: ASGIApp
    receipt: Receipt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, receive, send)
        finally:
            self.receipt.sent()
