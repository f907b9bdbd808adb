"""The headers of W3C Trace Context, and the limit for traces that callers force."""

import pytest

from gateway.observability.traceparent import (
    MOST_STATE_CHARS,
    ForcedSampling,
    ParentSpan,
    SpanIds,
    read_parent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"
PARENT = ParentSpan(int(TRACE, 16), int(SPAN, 16))


def test_a_traceparent_is_read_and_written() -> None:
    assert read_parent([VALID]) == PARENT
    assert PARENT.text == VALID
    assert PARENT.headers == {"traceparent": VALID}


def test_a_caller_that_does_not_sample_is_a_parent_all_the_same() -> None:
    assert read_parent([VALID[:-2] + "00"]) == ParentSpan(PARENT.trace_id, PARENT.span_id, 0)


def test_a_later_version_may_have_more_fields() -> None:
    assert read_parent([f"cc{VALID[2:]}-what-the-future"]) == PARENT


MALFORMED = {
    "empty": "",
    "words": "trace",
    "upper case": VALID.upper(),
    "version ff": f"ff{VALID[2:]}",
    "short version": VALID[1:],
    "long version": f"0{VALID}",
    "no version": VALID[3:],
    "version not hex": f"0g{VALID[2:]}",
    "trace of zeros": f"00-{'0' * 32}-{SPAN}-01",
    "span of zeros": f"00-{TRACE}-{'0' * 16}-01",
    "short trace": f"00-{TRACE[1:]}-{SPAN}-01",
    "long trace": f"00-{TRACE}0-{SPAN}-01",
    "trace not hex": f"00-{TRACE[:-1]}g-{SPAN}-01",
    "short span": f"00-{TRACE}-{SPAN[1:]}-01",
    "long span": f"00-{TRACE}-{SPAN}0-01",
    "short flags": VALID[:-1],
    "no flags": VALID[:-3],
    "flags not hex": f"{VALID[:-2]}.1",
    "more fields": f"{VALID}-more",
    "dash at the end": f"{VALID}-",
    "blank in front": f" {VALID}",
    "line behind": f"{VALID}\n",
    "underscores": VALID.replace("-", "_"),
    "later version without dash": f"cc{VALID[2:]}.more",
    "digits of another script": VALID.replace("1", "\u0661"),
    "64 KiB": VALID * 1192,
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_traceparent_is_none(text: str) -> None:
    assert read_parent([text]) is None


def test_two_traceparents_are_none() -> None:
    assert read_parent([VALID, VALID]) is None


MANY = ",".join(f"{number}=" for number in range(100))
"""A hundred members in 389 characters; W3C lets a server drop those behind the first 32."""


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        ((), ""),
        (("a=1", "b=2"), "a=1,b=2"),
        ((MANY,), MANY),
        (("a=" + "x" * (MOST_STATE_CHARS - 2),), "a=" + "x" * (MOST_STATE_CHARS - 2)),
        (("a=" + "x" * (MOST_STATE_CHARS - 1),), ""),
        (("a=" + "x" * 65536,), ""),
        (("a=\x00",), ""),
        (("a=\u00e9",), ""),
    ],
    ids=["none", "two", "a hundred", "longest", "too long", "64 KiB", "control", "not ASCII"],
)
def test_a_tracestate_that_is_too_long_or_not_text_is_dropped(
    states: tuple[str, ...], kept: str
) -> None:
    found = read_parent([VALID], states)
    assert found is not None
    assert (found.trace_id, found.state) == (PARENT.trace_id, kept)


def test_the_spans_of_a_request_are_in_the_trace_of_its_caller() -> None:
    ids = SpanIds(read_parent([VALID], ["a=1"]))
    assert ids.as_parent(5).headers == {
        "traceparent": f"00-{TRACE}-{5:016x}-01",
        "tracestate": "a=1",
    }
    assert ids.root_id != PARENT.span_id
    assert SpanIds(None).trace_id != SpanIds(None).trace_id


def test_callers_force_no_more_than_their_limit_of_traces_per_second() -> None:
    forced = ForcedSampling(50)
    assert sum(forced.take(100.0) for _ in range(80)) == 50
    assert sum(forced.take(100.5) for _ in range(80)) == 25
    assert sum(forced.take(1000.0) for _ in range(80)) == 50
