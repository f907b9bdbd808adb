"""Deadlines of requests, as their headers and their parameter `deadline_ms` name them."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import Deadline, InferRequest
from gateway.policy.caller import shown

PARAMETER = "deadline_ms"
"""The request parameter with the milliseconds to the whole answer; models do not get it."""
TIMEOUT = "x-request-timeout-ms"
ENVOY_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
MOMENT = "x-request-deadline"
READ_TIMEOUT = "x-stainless-read-timeout"
SLO_FIRST = "x-slo-ttft-ms"
SLO_TOKEN = "x-slo-tpot-ms"

NS_PER_MS = 1_000_000
NS_PER_SECOND = 1_000_000_000
DAY_NS = 24 * 3600 * NS_PER_SECOND
"""Later deadlines are none."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_MS = re.compile(r"[0-9]{1,18}")
NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, and values."""


@dataclass(slots=True)
class Wishes:
    """The times in the headers of a request or an RPC, in nanoseconds; 0 is none.

    `timeout_ns` is the time from the receipt to the whole answer, of streams to the first response,
    and `until_ns` its end in the Unix epoch. `read_ns` is the client's own limit of the time to the
    first byte. The RPC ends at `rpc_end_ns` of `time.perf_counter_ns`. `streams`: the answer is a
    stream.
    """

    timeout_ns: int = 0
    until_ns: int = 0
    read_ns: int = 0
    slo_first_ns: int = 0
    slo_token_ns: int = 0
    rpc_end_ns: int = 0
    streams: bool = False

    def deadline(self, received_ns: int, wall_ns: int) -> Deadline | None:
        """The deadline of a request that was received at `received_ns`; None if there is none.

        `wall_ns` is the time of the Unix epoch at the same moment: it is read once, so that a
        change of the system's clock moves no deadline.
        """
        asked = _after(received_ns, self.timeout_ns)
        if self.until_ns and self.until_ns - wall_ns <= DAY_NS:
            # Before the receipt it is over all the same, and 0 would be none.
            asked = earliest(asked, max(1, received_ns + self.until_ns - wall_ns))
        first, whole = (asked, 0) if self.streams else (0, asked)
        found = Deadline(
            first_ns=earliest(first, _after(received_ns, self.read_ns)),
            whole_ns=earliest(whole, self.rpc_end_ns),
            held_first_ns=first,
            held_whole_ns=whole,
            slo_first_ns=self.slo_first_ns,
            slo_token_ns=self.slo_token_ns,
            asked=bool(asked or self.slo_first_ns or self.slo_token_ns),
        )
        return None if found == NO_DEADLINE else found


NO_DEADLINE = Deadline()


def read_wishes(headers: Headers, rpc_end_ns: int = 0, *, streams: bool = False) -> Wishes | None:
    """The times in the headers; None if there are none.

    Of several times of one kind the earliest counts. INVALID_ARG for one that is malformed, unless
    a library or a proxy adds it: such a header is ignored.
    """
    found: Wishes | None = None
    if rpc_end_ns:
        found = Wishes(rpc_end_ns=rpc_end_ns, streams=streams)
    for name, value in headers:
        read = READERS.get(name)
        if read is not None:
            found = found or Wishes(streams=streams)
            read(found, value.decode("latin-1").strip())
    return found


def parameter_ns(value: Any) -> int:
    """The nanoseconds of a value of `deadline_ms`, 0 for none; INVALID_ARG if it is malformed."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""
    if isinstance(value, float) and 0 < value < 1:
        text = f"{value:.9f}"  # not as 1e-06
    found = _duration(text, NS_PER_MS)
    if found is None:
        raise _malformed(f"parameter '{PARAMETER}'", str(value), "a number of milliseconds")
    return found


def deadline_of(wishes: Wishes | None, received_ns: int) -> Deadline | None:
    """The deadline of a request with these times in its headers, received a moment ago."""
    if wishes is None:
        return None
    now_ns = time.time_ns() if wishes.until_ns else 0
    return wishes.deadline(received_ns, now_ns - (time.perf_counter_ns() - received_ns))


def timed(request: InferRequest) -> InferRequest:
    """The request for the model, with the deadline of its parameter `deadline_ms`."""
    parameters = dict(request.parameters)
    received_ns = request.received_ns or time.perf_counter_ns()
    due = _after(received_ns, parameter_ns(parameters.pop(PARAMETER)))
    deadline = request.deadline
    if due:
        found = deadline or NO_DEADLINE
        whole, held = earliest(due, found.whole_ns), earliest(due, found.held_whole_ns)
        deadline = replace(found, whole_ns=whole, held_whole_ns=held, asked=True)
    return replace(request, parameters=parameters, deadline=deadline)


def _after(received_ns: int, duration_ns: int) -> int:
    return received_ns + duration_ns if 0 < duration_ns <= DAY_NS else 0


def earliest(one: int, other: int) -> int:
    """The earlier of two times, of which 0 is none."""
    return min(one, other) if one and other else one or other


def _duration(text: str, unit_ns: int) -> int | None:
    """The nanoseconds of a number without a sign; 0 is none. None for other texts."""
    if NUMBER.fullmatch(text) is None:
        return None
    found = float(text)
    return max(1, round(found * unit_ns)) if found else 0


def _reader(
    name: str, field: str, unit_ns: int = NS_PER_MS, *, lenient: bool = False
) -> Callable[[Wishes, str], None]:
    def read(wishes: Wishes, text: str) -> None:
        found = _duration(text, unit_ns)
        if found is None and not lenient:
            raise _malformed(f"header '{name}'", text, "a number of milliseconds, such as 2500")
        setattr(wishes, field, earliest(getattr(wishes, field), found or 0))

    return read


def _read_moment(wishes: Wishes, text: str) -> None:
    wishes.until_ns = earliest(wishes.until_ns, _moment_ns(text))


def _moment_ns(text: str) -> int:
    """The nanoseconds of the epoch of a time of RFC 3339, or of milliseconds of the epoch."""
    if EPOCH_MS.fullmatch(text):
        return max(1, int(text) * NS_PER_MS)
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise ValueError(text)
        return max(1, (found - EPOCH) // timedelta(microseconds=1) * 1000)
    except (ValueError, OverflowError):
        expected = "a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
        raise _malformed(f"header '{MOMENT}'", text, expected) from None


def _malformed(where: str, found: str, expected: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"{where} is '{shown(found)}', expected {expected}")


READERS: Mapping[bytes, Callable[[Wishes, str], None]] = {
    TIMEOUT.encode(): _reader(TIMEOUT, "timeout_ns"),
    ENVOY_TIMEOUT.encode(): _reader(ENVOY_TIMEOUT, "timeout_ns", lenient=True),
    MOMENT.encode(): _read_moment,
    READ_TIMEOUT.encode(): _reader(READ_TIMEOUT, "read_ns", NS_PER_SECOND, lenient=True),
    SLO_FIRST.encode(): _reader(SLO_FIRST, "slo_first_ns", lenient=True),
    SLO_TOKEN.encode(): _reader(SLO_TOKEN, "slo_token_ns", lenient=True),
}
"""The headers that name a time."""
TIMES = READERS.keys()
TEXT_TIMES = frozenset(name.decode() for name in TIMES)
