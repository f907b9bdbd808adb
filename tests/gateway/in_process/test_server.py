"""The life of a server inside a program: started, used wrongly, stopped, and forgotten."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.in_process.server import Server
from gateway.observability.tracer import Tracer
from tests.builders import soon
from tests.conftest import tasks_left
from tests.gateway.in_process.conftest import SLOW, in_flight
from tests.serving import ROOT, http_get, wait_until, write_model

pytestmark = pytest.mark.both

ONE = np.ones(1, dtype=np.float32)
CYCLES = 50


def explicit(models: Path, *names: str, **options: object) -> Server:
    return Server(
        model_repository=models, model_control_mode="explicit", load_model=names, **options
    )


def threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until_only(names: list[str]) -> None:
    """The thread of an instance ends a moment after its model has been closed.

    Threads of others may end meanwhile.
    """

    def others() -> Counter[str]:
        return Counter(threads()) - Counter(names)

    try:
        wait_until(lambda: not others(), "no other threads are left")
    except AssertionError as error:
        raise AssertionError(f"{error}: {others()}") from None


def refused(error: pytest.ExceptionInfo[InferenceError]) -> tuple[Code, str]:
    return error.value.code, error.value.message


def test_a_server_returns_metadata_of_itself_and_its_models(models: Path) -> None:
    with explicit(models, "fp32", id="mine") as server:
        assert server.live()
        assert server.ready()
        assert server.metadata()["name"] == "mine"
        assert server.ports == {}
        model = server.model("fp32")
        assert model.ready()
        assert model.metadata()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
        assert model.config()["backend"] == "identity"
        model.infer(inputs={"x": ONE}).only()
        row = model.statistics()["model_stats"][0]
        assert (row["name"], row["inference_stats"]["success"]["count"]) == ("fp32", 1)
        assert 'nv_inference_request_success{model="fp32",version="1"} 1' in server.metrics()
        assert not server.model("fp32", version=7).ready()
        assert not server.model("text").ready()
    assert not server.live()
    assert not server.ready()


def test_models_are_loaded_and_unloaded_by_name_and_by_override(models: Path) -> None:
    with explicit(models) as server:
        states = {key: model.state for key, model in server.models().items()}
        assert states["fp32", ""] == ""
        assert server.load("fp32").infer(inputs={"x": ONE}).only().outputs["y"] == [1]
        assert set(server.models(exclude_not_ready=True)) == {("fp32", "1")}
        given = {"config": {"backend": "repeat"}, "file:1/nothing": b""}
        uploaded = server.load("mine", given)
        inputs = {"text_input": ["a"], "n": [2]}
        assert len(list(uploaded.infer(inputs=inputs))) == 2
        server.unload(uploaded)
        server.unload("nobody knows")
        with pytest.raises(InferenceError, match="'mine' has no available versions") as caught:
            uploaded.infer(inputs=inputs).only()
        assert caught.value.code is Code.NOT_FOUND
        with pytest.raises(InferenceError, match="load parameter 'file:x' is str, expected"):
            server.load("fp32", {"file:x": "no bytes"})
        with pytest.raises(InferenceError, match="failed to load 'absent'"):
            server.load("absent")


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        (5, None, "the model to load is a int, expected its name"),
        ("fp32", [1], "load parameters are list, expected a mapping"),
        ("fp32", {1: b""}, "load parameter '1' is bytes, expected 'config' with JSON"),
        ("fp32", {"config": {"name": object()}}, "'config' cannot be written as JSON: Object of"),
    ],
)
def test_an_invalid_load_is_refused_and_the_server_serves(
    models: Path, name: Any, parameters: Any, text: str
) -> None:
    with explicit(models, "fp32") as server:
        with pytest.raises(InferenceError, match=text) as caught:
            server.load(name, parameters)
        assert caught.value.code is Code.INVALID_ARG
        assert server.model("fp32").infer(inputs={"x": ONE}).only().outputs["y"] == [1]


def test_a_missing_repository_fails_the_start(tmp_path: Path) -> None:
    before = threads()
    with pytest.raises(InferenceError, match="folder 'absent' does not exist") as caught:
        explicit(tmp_path / "absent").start()
    assert caught.value.code is Code.NOT_FOUND
    wait_until_only(before)


def test_ports_are_open_only_if_they_are_asked_for(models: Path) -> None:
    options = {"http_port": 0, "http_address": "127.0.0.1", "grpc_port": 0}
    with explicit(models, "fp32", **options) as server:
        assert set(server.ports) == {"http", "grpc"}
        assert http_get(server.ports["http"], "/v2/health/ready")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        http_get(server.ports["http"], "/v2/health/ready")


def test_cycles_of_start_and_stop_leave_no_thread_and_no_file(models: Path) -> None:
    def cycle() -> None:
        with explicit(models, "fp32", "add_sub") as server:
            server.model("fp32").infer(inputs={"x": ONE}).only()

    cycle()
    before = threads(), open_files()
    for _ in range(CYCLES):
        cycle()
    wait_until_only(before[0])
    assert open_files() == before[1]


async def test_cycles_on_an_event_loop_leave_no_task_and_no_file(models: Path) -> None:
    async def cycle() -> None:
        async with explicit(models, "fp32", "add_sub") as server:
            await server.model("fp32").async_infer(inputs={"x": ONE}).only()

    known = threads()
    await cycle()
    before = open_files()
    for _ in range(CYCLES):
        await cycle()
    assert (open_files(), tasks_left()) == (before, [])
    wait_until_only(known + [name for name in threads() if name.startswith("asyncio")])


async def test_traces_are_written_in_a_thread_as_an_event_loop_stops_its_server(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(Tracer, "close", lambda _: closed.append(threading.get_ident()))
    async with explicit(models, "fp32"):
        pass
    assert len(closed) == 1
    assert closed != [threading.get_ident()]


def test_an_exception_in_the_block_stops_the_server_and_is_raised(models: Path) -> None:
    before = threads()
    kept = []

    def fail() -> None:
        with explicit(models, "fp32", "slow") as server:
            kept.append(server.model("slow").infer(inputs={"x": ONE}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until_only(before)
    with pytest.raises(InferenceError) as caught:
        next(kept[0])
    assert refused(caught) == (Code.CANCELLED, "Request was cancelled")


def test_use_before_the_start_and_after_the_stop_says_so(models: Path) -> None:
    server = explicit(models, "fp32")
    server.stop()
    with pytest.raises(InferenceError) as caught:
        server.model("fp32")
    assert refused(caught) == (
        Code.INVALID_ARG,
        "the server has not been started: call start, or use `with`",
    )
    with server:
        model = server.model("fp32")
        with pytest.raises(InferenceError, match="the server has been started already"):
            server.start()
    server.stop()
    for use in (lambda: model.infer(inputs={"x": ONE}), model.metadata, server.models):
        with pytest.raises(InferenceError) as caught:
            use()
        assert refused(caught) == (
            Code.UNAVAILABLE,
            "the server is not running: it has been stopped",
        )
    with server:
        assert server.ready()
        assert server.model("fp32").infer(inputs={"x": ONE}).only().outputs["y"] == [1]


async def test_use_after_the_stop_says_so_on_an_event_loop(models: Path) -> None:
    async with explicit(models, "fp32") as server:
        model = server.model("fp32")
    await server.async_stop()
    with pytest.raises(InferenceError, match="it has been stopped"):
        model.async_infer(inputs={"x": ONE})
    with pytest.raises(InferenceError, match="it has been stopped"):
        await server.async_models()
    with pytest.raises(InferenceError, match="it has been stopped"):
        model.metadata()


async def test_a_blocking_call_on_the_servers_loop_names_the_async_form(models: Path) -> None:
    async with explicit(models, "fp32") as server:
        for use, instead in (
            (lambda: server.model("fp32").infer(inputs={"x": ONE}), "async_infer"),
            (lambda: server.load("fp32"), "async_load"),
            (server.models, "async_models"),
            (server.metrics, "async_metrics"),
            (server.stop, "async_stop"),
        ):
            with pytest.raises(InferenceError, match=f"use {instead} here"):
                use()
        await server.async_unload((await server.async_load("text")).name)
        assert "nv_inference_count" in await server.async_metrics()
        assert set(await server.async_models(exclude_not_ready=True)) == {("fp32", "1")}


def test_a_failed_load_fails_the_start_and_closes_everything(models: Path) -> None:
    write_model(models, "broken", 'backend: "nobody"')
    before = threads()
    with pytest.raises(InferenceError, match="unable to find backend 'nobody'"):
        explicit(models, "fp32", "broken").start()
    wait_until_only(before)
    with explicit(models, "fp32", "broken", exit_on_error=False) as server:
        assert not server.ready()
        assert server.model("fp32").ready()
        assert "nobody" in server.models()["broken", "1"].reason


async def test_a_failed_load_fails_the_start_on_an_event_loop(models: Path) -> None:
    with pytest.raises(InferenceError, match="the server cannot start: failed to load all models"):
        await explicit(models, "absent").async_start()
    assert tasks_left() == []


def test_a_start_that_takes_too_long_is_given_up(models: Path) -> None:
    before = threads()
    with pytest.raises(InferenceError, match="not loaded within 0 s") as caught:
        explicit(models, "fp32", "add_sub").start(timeout=0)
    assert caught.value.code is Code.UNAVAILABLE
    wait_until_only(before)


def test_requests_of_others_may_end_while_the_server_stops(models: Path) -> None:
    write_model(models, "short", SLOW % 1_000_000)
    found: list[object] = []
    with explicit(models, "short") as server:
        model = server.model("short")
        asking = threading.Thread(
            target=lambda: found.append(model.infer(inputs={"x": ONE}).only().outputs["y"])
        )
        asking.start()
        wait_until(lambda: in_flight(server.metrics(), "short") == 1, "the request is in flight")
    asking.join()
    assert found == [[1]]


def test_requests_that_outlast_the_drain_fail_with_the_reason(models: Path) -> None:
    errors: list[InferenceError] = []

    def ask() -> None:
        with pytest.raises(InferenceError) as caught:
            model.infer(inputs={"x": ONE}).only()
        errors.append(caught.value)

    with explicit(models, "slow", exit_timeout_secs=0.01) as server:
        model = server.model("slow")
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: in_flight(server.metrics(), "slow") == 1, "the request is in flight")
    asking.join()
    assert errors[0].code is Code.UNAVAILABLE
    assert "did not end within its --exit-timeout-secs of 0.01" in errors[0].message


def test_a_waiting_thread_gets_an_error_at_the_end_of_the_loop(models: Path) -> None:
    errors: list[InferenceError] = []

    def ask(server: Server) -> None:
        with pytest.raises(InferenceError) as caught:
            server.model("slow").infer(inputs={"x": ONE}).only()
        errors.append(caught.value)

    async def forget() -> threading.Thread:
        server = await explicit(models, "slow").async_start()
        asking = threading.Thread(target=ask, args=(server,))
        asking.start()
        await soon(asyncio.to_thread(wait_until_asked, server))
        return asking

    def wait_until_asked(server: Server) -> None:
        wait_until(lambda: in_flight(server.metrics(), "slow") == 1, "the request is in flight")

    asking = asyncio.run(forget())
    asking.join()
    assert errors[0].code is Code.UNAVAILABLE


async def test_a_cancelled_stop_cancels_the_remaining_requests(models: Path) -> None:
    server = await explicit(models, "slow").async_start()
    asking = asyncio.create_task(server.model("slow").async_infer(inputs={"x": ONE}).only())
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await server.async_stop()
    with pytest.raises(InferenceError) as caught:
        await soon(asking)
    assert caught.value.code is Code.UNAVAILABLE
    assert tasks_left() == []


def test_a_collected_server_stops_with_a_warning(models: Path) -> None:
    before = threads()
    model = explicit(models, "fp32").start().model("fp32")
    gc.collect()
    responses = model.infer(inputs={"x": ONE})
    del model
    gc.collect()
    assert next(responses).outputs["y"] == [1]
    with pytest.warns(ResourceWarning, match="dropped without stop"):
        del responses
    wait_until_only(before)


FORGOTTEN = """
import sys
import numpy as np
from gateway.in_process.server import Server
server = Server(model_repository=sys.argv[1], load_model=["fp32", "add_sub", "slow"],
                model_control_mode="explicit", exit_timeout_secs=0.1).start()
one = np.ones(1, dtype=np.float32)
kept = server.model("slow").infer(inputs={"x": one})
print(server.model("fp32").infer(inputs={"x": one}).only().outputs["y"])
"""

FORGOTTEN_ON_A_LOOP = """
import asyncio, sys
import numpy as np
from gateway.in_process.server import Server
async def main():
    server = await Server(model_repository=sys.argv[1], load_model=["fp32", "add_sub", "slow"],
                          model_control_mode="explicit").async_start()
    one = np.ones(1, dtype=np.float32)
    kept = server.model("slow").async_infer(inputs={"x": one})
    response = await server.model("fp32").async_infer(inputs={"x": one}).only()
    print(response.outputs["y"])
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [FORGOTTEN, FORGOTTEN_ON_A_LOOP], ids=["thread", "loop"])
def test_a_missing_stop_does_not_delay_the_exit_of_the_program(models: Path, program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", program, str(models)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
    )
    log = [line for line in ended.stderr.splitlines() if line != "drain over"]
    assert (ended.returncode, ended.stdout, log) == (0, "[1.]\n", [])
