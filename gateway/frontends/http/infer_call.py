"""One infer over HTTP before its body is read, and its failure."""

from dataclasses import dataclass
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope

from gateway.frontends.http.errors import failed
from gateway.frontends.http.timing import timed
from gateway.observability.receipt import Receipt
from gateway.policy.caller import Caller


class InferHead(NamedTuple):
    """The model, the requested version and the headers of a request.

    It `has_times` in these. `is_timed`: its receipt is `wished`, or every request has one.
    """

    model: str
    version: str
    headers: dict[bytes, bytes]
    has_times: bool
    is_timed: bool
    wished: bool


@dataclass(slots=True)
class InferCall:
    """One request before its body is read; its receipt, if it has one, follows."""

    scope: Scope
    receive: Receive
    head: InferHead
    received_ns: int
    caller: Caller | None
    receipt: Receipt | None = None


def failure_of(call: InferCall, error: Exception) -> Response:
    """The answer to a request that failed."""
    answer = failed(call.scope["path"], error)
    return answer if call.receipt is None else timed(answer, call.receipt)
