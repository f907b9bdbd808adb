"""Time limits of HTTP connections, in raw bytes: late heads, still bodies, idle connections."""

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.models import REPEAT, identity
from tests.conformance.neighbour import neighbour
from tests.raw import Answer, Connection, get, post
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

HEAD_SECS, BODY_SECS, IDLE_SECS = 1.0, 1.0, 2.5
LIMITS = (
    f"--http-head-timeout-secs={HEAD_SECS}",
    f"--http-body-idle-secs={BODY_SECS}",
    f"--http-connection-idle-secs={IDLE_SECS}",
)
NO_LIMITS = tuple(flag.partition("=")[0] + "=0" for flag in LIMITS)
EARLY_SECS = 0.1
"""A loop's clock may be behind the client's by this."""

PATH = "/v2/models/repeat/generate_stream"
ONE = {"text_input": "x", "n": 1}
SLOW = {"text_input": "x", "n": 6, "delay_us": 600_000}
"""A stream that lasts longer than every limit."""

HEAD = b"POST /v2/models/repeat/generate HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"text_input": "abcdefgh", "n": 1}'
HALF_HEADS = [b"P", b"POST /v2/models/rep", HEAD, HEAD + b"Content-Length: 10"]
HALF_BODIES = [
    b"Content-Length: 100\r\n\r\n",
    b"Content-Length: 100\r\n\r\n" + BODY,
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n",
    b"Content-Length: 200000\r\n\r\n" + bytes(100_000),
]
CONNECTIONS = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "sixteen", identity("FP32", "16"))
    return folder


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two frontends"])
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[Serving]:
    with serving(models, f"--frontends={request.param}", *LIMITS) as started:
        yield started
    assert started.process.returncode == 0
    assert "Traceback" not in started.text


@pytest.fixture
def connection(server: Serving) -> Iterator[Connection]:
    with Connection(server.ports["http"]) as found:
        yield found


def is_too_late(connection: Connection) -> bool:
    """Whether the server answers 408 as an error of v2, and closes the connection."""
    answer = connection.answer()
    assert answer.headers["connection"] == "close"
    assert list(answer.json) == ["error"]
    return answer.status == 408 and connection.ended


def refused_after(port: int, halves: Sequence[bytes]) -> float:
    """Send each half on a connection of its own; seconds until the first was refused."""
    began = time.monotonic()
    with ExitStack() as stack:
        crowd = [stack.enter_context(Connection(port)) for _ in halves]
        for each, half in zip(crowd, halves, strict=True):
            each.send(half)
        late = is_too_late(crowd[0])
        passed = time.monotonic() - began
        assert late
        assert [
            half for each, half in zip(crowd[1:], halves[1:], strict=True) if not is_too_late(each)
        ] == []
    return passed


def answered(connection: Connection) -> Answer:
    connection.ask(PATH, ONE)
    answer = connection.answer()
    assert answer.status == 200
    return answer


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_a_head_that_does_not_end_is_refused_at_the_limit(server: Serving, port: str) -> None:
    assert refused_after(server.ports[port], HALF_HEADS) > HEAD_SECS - EARLY_SECS


def test_the_bytes_of_a_head_do_not_extend_its_limit(connection: Connection) -> None:
    began = time.monotonic()
    connection.send(HEAD)
    while not select.select([connection.socket], [], [], HEAD_SECS / 5)[0]:
        assert time.monotonic() - began < WAIT_SECS
        connection.send(b"x-drip: y\r\n")
    assert is_too_late(connection)
    assert time.monotonic() - began > HEAD_SECS - EARLY_SECS


def test_a_connection_that_says_nothing_is_closed_without_a_word(server: Serving) -> None:
    began = time.monotonic()
    with Connection(server.ports["http"]) as connection:
        assert connection.ended
    assert time.monotonic() - began > IDLE_SECS - EARLY_SECS


def test_a_first_head_is_due_from_its_first_byte(connection: Connection) -> None:
    time.sleep(HEAD_SECS * 1.3)
    began = time.monotonic()
    connection.send(HEAD)
    assert is_too_late(connection)
    assert time.monotonic() - began > HEAD_SECS - EARLY_SECS


def test_a_connection_that_a_client_keeps_for_later_serves_its_first_request(
    connection: Connection,
) -> None:
    time.sleep(HEAD_SECS * 1.3)
    answered(connection)


def test_a_head_just_within_the_limit_is_served(connection: Connection) -> None:
    connection.send(HEAD + b"Content-Length: %d\r\n" % len(BODY))
    time.sleep(HEAD_SECS * 0.6)
    connection.send(b"\r\n" + BODY)
    assert connection.answer().status == 200


def test_a_body_that_stands_still_is_refused_at_the_limit(server: Serving) -> None:
    halves = [HEAD + half for half in HALF_BODIES]
    assert refused_after(server.ports["http"], halves) > BODY_SECS - EARLY_SECS


def test_a_client_told_to_continue_owes_its_body(connection: Connection) -> None:
    connection.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
    assert connection.line().split()[1] == b"100"
    connection.line()
    assert is_too_late(connection)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_slow_but_steady_body_is_served(connection: Connection, *, chunked: bool) -> None:
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    connection.send(HEAD + framing + b"\r\n\r\n")
    for at in range(0, len(BODY), 9):
        time.sleep(BODY_SECS / 2)
        piece = BODY[at : at + 9]
        connection.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        connection.send(b"0\r\n\r\n")
    assert connection.answer().json["text_output"] == "abcdefgh"


def test_a_body_that_stops_after_its_refusal_is_not_waited_for(connection: Connection) -> None:
    connection.send(HEAD + b"Content-Length: 100000000\r\n\r\n" + BODY)
    assert connection.answer().status == 400
    assert connection.ended


def test_an_idle_connection_is_closed_without_a_word(connection: Connection) -> None:
    began = time.monotonic()
    answered(connection)
    assert connection.ended
    assert time.monotonic() - began > IDLE_SECS - EARLY_SECS


def test_a_client_keeps_its_connection_by_using_it(connection: Connection) -> None:
    for _ in range(3):
        answered(connection)
        time.sleep(IDLE_SECS * 0.4)
    answered(connection)


def test_a_next_head_is_due_from_its_first_byte(connection: Connection) -> None:
    answered(connection)
    time.sleep(HEAD_SECS * 1.3)
    began = time.monotonic()
    connection.send(HEAD)
    assert is_too_late(connection)
    assert time.monotonic() - began > HEAD_SECS - EARLY_SECS


@pytest.mark.parametrize("path", [PATH, PATH.removesuffix("_stream")])
def test_no_limit_ends_an_answer(connection: Connection, path: str) -> None:
    body = SLOW if path == PATH else {"text_input": "x", "n": 1, "delay_us": 3_000_000}
    connection.ask(path, body)
    answer = connection.answer()
    assert answer.status == 200
    assert answer.body.count(b"text_output") == body["n"]


@pytest.mark.parametrize("half", [b"POST /v2/mo", HEAD + b"Content-Length: 10\r\n\r\n"])
def test_half_a_request_behind_a_stream_is_due_when_that_has_ended(
    connection: Connection, half: bytes
) -> None:
    connection.ask(PATH, SLOW)
    connection.send(half)
    assert connection.answer().body.count(b"text_output") == SLOW["n"]
    began = time.monotonic()
    assert is_too_late(connection)
    assert time.monotonic() - began > HEAD_SECS / 2


def test_pipelined_requests_are_answered_in_order(connection: Connection) -> None:
    bodies = [b'{"text_input": "%d", "n": 1, "delay_us": 500000}' % number for number in range(5)]
    connection.send(b"".join(post(PATH, body) for body in bodies) + get("/v2/health/live"))
    for number in range(5):
        assert b'"text_output":"%d"' % number in connection.answer().body
    assert connection.answer().status == 200


def test_half_heads_in_mass_are_gone_at_the_limit_and_neighbours_are_served(
    server: Serving,
) -> None:
    with ExitStack() as stack:
        beside = stack.enter_context(neighbour(server.grpc))
        idle = stack.enter_context(Connection(server.ports["http"]))
        crowd = [stack.enter_context(Connection(server.ports["http"])) for _ in range(CONNECTIONS)]
        for each in crowd:
            each.send(HEAD)
        assert all(is_too_late(each) for each in crowd)
        assert idle.ended
        served = beside.served()
    assert not served.errors
    assert served.answers > 0


def test_0_turns_the_limits_off(models: Path) -> None:
    with serving(models, *NO_LIMITS) as server, ExitStack() as stack:
        crowd = [stack.enter_context(Connection(server.ports["http"])) for _ in range(4)]
        answered(crowd[1])
        crowd[2].send(HEAD)
        crowd[3].send(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for each in crowd:
            each.wait_taken()
        before = server.open_files
        time.sleep(IDLE_SECS + HEAD_SECS)
        assert server.open_files == before
        crowd[2].send(b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        crowd[3].send(BODY)
        assert [answered(each).status for each in crowd[:2]] == [200, 200]
        assert [each.answer().status for each in crowd[2:]] == [200, 200]


def test_a_lost_connection_leaves_nothing_behind(models: Path) -> None:
    with serving(models, *LIMITS) as server:
        before = server.open_files
        for half in (b"", HEAD, HEAD + b"Content-Length: 10\r\n\r\n"):
            with Connection(server.ports["http"]) as connection:
                connection.send(half)
                connection.reset()
        wait_until(lambda: server.open_files == before, "the connections are closed")
        time.sleep(HEAD_SECS * 1.2)
        assert "timed out" not in server.text
