"""Streams of one router of a fleet that are resumed at another one, on both wires."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import httpx
import pytest

from tests.conformance.models import REPEAT
from tests.conformance.test_resumption import ASK, COUNT, long, question, rest, told
from tests.conformance.test_resumption import LONG as ENDLESS
from tests.conformance.test_resumption import PATH as STREAM
from tests.raw import Connection, get
from tests.rpc import connected, streaming
from tests.serving import Serving, replica, serving, static_fleet, wait_until, write_model

SECRET = "0123456789abcdef" * 4


Start = Callable[[], AbstractContextManager[Serving]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Start]:
    """Starts a router of one replica, which knows those that were started before it."""
    folder = tmp_path_factory.mktemp("relays")
    write_model(folder / "models", "repeat", REPEAT)
    (folder / "nothing").mkdir()
    (folder / "secret").write_text(SECRET)
    secret = f"--fleet-secret-file={folder / 'secret'}"
    with replica(folder / "models", "repeat", secret, environment=environment) as host:
        yield partial(serving, folder / "nothing", "--fleet-port=0", secret, static_fleet(host))


@pytest.fixture(scope="module")
def second(start: Start) -> Iterator[Serving]:
    with start() as found:
        yield found
    assert found.process.returncode == 0, found.log[-50:]
    assert "Traceback" not in found.text


@pytest.fixture(scope="module")
def first(start: Start, second: Serving) -> Iterator[Serving]:
    with start() as found:
        wait_until(lambda: known(second, found) and known(found, second), "both are known")
        yield found
    assert "Traceback" not in found.text


def known(router: Serving, other: Serving) -> bool:
    """Whether a router knows another one."""
    name = httpx.get(f"{other.http}/v2/fleet").json()["id"]
    routers = httpx.get(f"{router.http}/v2/fleet").json()["routers"]
    return name in [each["id"] for each in routers]


def test_a_stream_of_grpc_is_resumed_at_another_router(first: Serving, second: Serving) -> None:
    with connected(first.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question("a", resumable=True))
        token = told(rpc.answer())[2]
    with connected(second.grpc) as stub, streaming(stub) as rpc:
        asked = {"resume": token, "resume_after": 1, "triton_enable_empty_final_response": True}
        rpc.ask(question("b", **asked))
        found = rpc.rest()
        numbers = range(2, COUNT + 1)
        expected = [("b", number, token if number == 2 else "") for number in numbers]
        assert [told(each) for each in found][: len(expected)] == expected
        assert {each.infer_response.model_version for each in found} == {"1"}
        assert found[-1].infer_response.parameters["triton_final_response"].bool_param
    with connected(second.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question("c", "other", resume=token))
        assert "there is no such stream" in rpc.answer().error_message


def test_a_resumed_stream_is_cancelled_at_its_router(first: Serving, second: Serving) -> None:
    with connected(first.grpc) as own, streaming(own) as rpc:
        rpc.ask(long("a", resumable=True))
        token = told(rpc.answer())[2]
        with connected(second.grpc) as stub, streaming(stub) as other:
            other.ask(question("b", resume=token, resume_after=1))
            assert told(other.answer())[:2] == ("b", 2)
            other.ask(question("b", cancel=True))
            for each in (other, rpc):
                last = each.rest()[-1].infer_response
                assert last.parameters["cancelled"].bool_param
                assert last.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("asked_by", ["http", "grpc"])
@pytest.mark.parametrize("cancelled_by", ["http", "grpc"])
def test_a_request_is_cancelled_by_its_id_at_another_router(
    first: Serving, second: Serving, asked_by: str, cancelled_by: str
) -> None:
    name = f"{asked_by}-{cancelled_by}"
    with ExitStack() as owner:
        if asked_by == "http":
            connection = owner.enter_context(Connection(first.ports["http"]))
            connection.ask(STREAM, {**ENDLESS, "id": name})
            connection.head()
            connection.chunk()
        else:
            rpc = owner.enter_context(streaming(owner.enter_context(connected(first.grpc))))
            rpc.ask(long(name))
            rpc.answer()
        assert not cancel(second, cancelled_by, f"not {name}")
        assert cancel(second, cancelled_by, name)
        assert not cancel(second, cancelled_by, name)
        if asked_by == "http":
            assert b'"cancelled":true' in connection.rest()
        else:
            last = rpc.rest()[-1].infer_response
            assert last.parameters["cancelled"].bool_param


def cancel(router: Serving, wire: str, name: str) -> bool:
    """Cancel a request at a router; whether there was one."""
    if wire == "http":
        answer = httpx.post(f"{router.http}/v2/models/repeat/requests/{name}/cancel")
        assert answer.status_code == 200 or "runs no request with the id" in answer.text
        return answer.status_code == 200
    with connected(router.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question(name, cancel=True))
        refusals = [each.error_message for each in rpc.rest()]
        assert all("runs no request with the id" in each for each in refusals)
        return not refusals


def test_a_stream_whose_router_is_killed_ends_with_an_error(start: Start, second: Serving) -> None:
    with start() as killed:
        wait_until(lambda: known(second, killed), "the router is known")
        with Connection(killed.ports["http"]) as connection:
            connection.ask(STREAM, {**ASK, "resumable": True})
            done = connection.head().headers["sluice-stream"]
            connection.rest()
        with Connection(killed.ports["http"]) as connection:
            connection.ask(STREAM, {**ENDLESS, "resumable": True})
            token = connection.head().headers["sluice-stream"]
        assert rest(second, done, 0).count(b"id: ") == COUNT
        with Connection(second.ports["http"]) as connection:
            connection.send(get(STREAM, f"Last-Event-ID: {token}.0"))
            assert connection.head().status == 200
            connection.chunk()
            killed.process.kill()
            assert b"was lost after response" in connection.rest()
        for each in (token, done):
            answer = httpx.get(second.http + STREAM, headers={"Last-Event-ID": f"{each}.1"})
            assert answer.status_code == 404
            assert "there is no such stream" in answer.json()["error"]
