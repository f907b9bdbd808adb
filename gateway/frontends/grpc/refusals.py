"""Refusals as clients of gRPC read them: trailers with messages of google.rpc, and parameters.

The few fields of these messages are written here, since few servers have their package.
"""

import math
from collections.abc import Iterator, Mapping

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration

from gateway.errors import InferenceError, Refusal
from gateway.frontends.grpc.protobuf_wire import sized
from gateway.messages import NO_PARAMETERS, Parameter

DETAILS = "grpc-status-details-bin"
PUSHBACK = "grpc-retry-pushback-ms"
"""The wait that the retry policy of gRPC's clients obeys; a negative one forbids retries."""
NO_RETRY = "-1"
WANTS_LIMITS = ("x-want-limits", "1")
"""Metadata of an RPC whose trailing metadata has the limits of its caller."""
DOMAIN = b"sluice"
TYPES = "type.googleapis.com/google.rpc."


def trailers(error: Refusal, status: int, text: str) -> list[tuple[str, str | bytes]]:
    """The trailing metadata of a refusal with that status and text."""
    advice, found = error.advice, list[tuple[str, str | bytes]](error.advice.headers.items())
    if not advice.retries:
        found.append((PUSHBACK, NO_RETRY))
    elif advice.retry_after_secs:
        found.append((PUSHBACK, str(math.ceil(advice.retry_after_secs * 1000))))
    details = (Any(type_url=TYPES + name, value=value) for name, value in _details(error, text))
    written = [_text(3, each.SerializeToString()) for each in details]
    code = bytes((8, status))
    found.append((DETAILS, b"".join((code, _text(2, text.encode()), *written))))
    return found


def _details(error: Refusal, text: str) -> Iterator[tuple[str, bytes]]:
    advice, reason = error.advice, error.refusal_reason
    facts = {"reason": str(reason), "limit": advice.limit}
    if advice.predicted_wait_secs is not None:
        facts["predicted_wait_ms"] = str(round(advice.predicted_wait_secs * 1000))
    entries = [
        _text(3, _text(1, name.encode()) + _text(2, value.encode()))
        for name, value in facts.items()
        if value
    ]
    yield "ErrorInfo", b"".join((_text(1, reason.name.encode()), _text(2, DOMAIN), *entries))
    if advice.retries and advice.retry_after_secs:
        delay = Duration()
        delay.FromMilliseconds(math.ceil(advice.retry_after_secs * 1000))
        yield "RetryInfo", _text(1, delay.SerializeToString())
    if advice.limit:
        violation = _text(1, advice.limit.encode()) + _text(2, text.encode())
        yield "QuotaFailure", _text(1, violation)


def _text(field: int, value: bytes) -> bytes:
    """A field of a text, of bytes or of a message."""
    return sized(bytes((field << 3 | 2,)), len(value)) + value


def refusal_parameters(error: InferenceError) -> Mapping[str, Parameter]:
    """The parameters of the error message of a stream."""
    if not isinstance(error, Refusal):
        return NO_PARAMETERS
    found: dict[str, Parameter] = {"refused_reason": str(error.refusal_reason)}
    if error.advice.retries and error.advice.retry_after_secs:
        found["retry_after_ms"] = math.ceil(error.advice.retry_after_secs * 1000)
    return found
