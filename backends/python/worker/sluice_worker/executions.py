"""Executions of the loaded model, and the event loop of its async methods."""

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .business_logic import SERVED
from .connection import GatewayConnection, Packing, Unpacking
from .errors import BadAnswer, described_failure
from .observability import Level
from .open_requests import OpenRequests
from .protocol import ToGateway
from .request import InferenceRequest
from .response import InferenceResponse

Failed = Callable[[BaseException], None]


class Background:
    """The event loop of async methods: one thread for the life of the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._running: set[concurrent.futures.Future[Any]] = set()

    def result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it and return its result; not for calls from a coroutine of this loop."""
        return self._begin(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], failed: Failed) -> None:
        """Run it; `failed` gets its exception."""
        future = self._begin(coroutine)
        self._running.add(future)

        def ended(done: "concurrent.futures.Future[Any]") -> None:
            self._running.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                failed(error)

        future.add_done_callback(ended)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until all started coroutines have ended."""
        concurrent.futures.wait(list(self._running), seconds)

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                thread.start()
            return self._loop


class Executions:
    """Executions of one loaded model, one at a time."""

    def __init__(self, model: Any, args: dict[str, str], shown: str, requests: OpenRequests):
        self.background = Background()
        self._execute = getattr(model, "execute", None)
        self._shown, self._requests = shown, requests
        self._connection: GatewayConnection = requests.connection
        self._instance = args["model_instance_name"]
        outputs = json.loads(args["model_config"]).get("output", ())
        self._every_output = frozenset(each["name"] for each in outputs)

    def run(self, execution: int, headers: Sequence[Any], body: memoryview) -> None:
        """Execute the requests, and send their results in one message."""
        packing = Packing(self._connection)
        requests = self._received(headers, body)
        SERVED.set(headers)
        started = time.perf_counter_ns()
        error: list[str] | None = None
        answers: list[Any] = []
        try:
            returned = self._returned(requests)
            infer_ns = time.perf_counter_ns() - started
            answers = self._answers(requests, returned, packing)
            del returned
        except BaseException as failure:  # noqa: BLE001 - around one execution of foreign code
            infer_ns = time.perf_counter_ns() - started
            packing.give_back()
            error, answers, packing = described_failure(failure), [], Packing(self._connection)
            for each in requests:
                each.open_request.close()
        # Dropped before the message is sent, so that it also names the released segments.
        requests.clear()
        header = [ToGateway.EXECUTED, execution, error, answers, infer_ns]
        self._connection.send(header, packing.buffers)

    def _received(self, headers: Sequence[Any], body: memoryview) -> list[InferenceRequest]:
        unpacking = Unpacking(self._connection, body)
        requests = []
        for header in headers:
            wanted = frozenset(header[9]) if header[9] else self._every_output
            open_request = self._requests.add(header[0], wanted)
            inputs = unpacking.tensors(header[10])
            requests.append(InferenceRequest.received(header, inputs, open_request, wanted))
        return requests

    def _returned(self, requests: list[InferenceRequest]) -> Any:
        if self._execute is None:
            raise BadAnswer(f"Python model {self._shown} does not implement `execute` method.")
        # A copy: model.py may keep or change the list.
        returned = self._execute(list(requests))
        if type(returned) is not list and isinstance(returned, Coroutine):
            if not self._requests.decoupled:
                return self.background.result(returned)
            self.background.start(returned, self._log)
            return None
        return returned

    def _answers(
        self, requests: Sequence[InferenceRequest], returned: Any, packing: Packing
    ) -> list[Any]:
        if returned is None:
            return [_rescheduled(each) for each in requests if each.rescheduled]
        if self._requests.decoupled:
            raise BadAnswer(
                f"Python model '{self._instance}' is using the decoupled mode and the execute "
                "function must return None."
            )
        _check_list(requests, returned)
        answers = []
        for request, response in zip(requests, returned, strict=True):
            if response is not None:
                _check_response(request, response)
                answers.append(_answer(request, response, packing))
            elif request.rescheduled:
                answers.append(_rescheduled(request))
        return answers

    def _log(self, failure: BaseException) -> None:
        text = "\n".join([f"execute of '{self._instance}' failed", *described_failure(failure)])
        place = getattr(self._execute, "__code__", None)
        where = ("", 0) if place is None else (place.co_filename, place.co_firstlineno)
        self._connection.send([ToGateway.LOG, Level.ERROR.name, text, *where])


def _answer(request: InferenceRequest, response: InferenceResponse, packing: Packing) -> list[Any]:
    open_request = request.open_request
    open_request.claim()
    packed = packing.response(response, open_request.wanted)
    return [open_request.number, packed, True, False]


def _rescheduled(request: InferenceRequest) -> list[Any]:
    request.open_request.close()
    return [request.open_request.number, None, False, True]


def _check_list(requests: Sequence[InferenceRequest], returned: Any) -> None:
    if not isinstance(returned, list):
        raise BadAnswer(f"Expected a list in the execute return, found type '{type(returned)}'.")
    if len(returned) != len(requests):
        raise BadAnswer(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size "
            f"is:{len(returned)}\n"
        )


def _check_response(request: InferenceRequest, response: Any) -> None:
    if request.rescheduled:
        raise BadAnswer(
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
    if not isinstance(response, InferenceResponse):
        raise BadAnswer(
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
