"""Requests in an engine: their answers, cancellations and failures."""

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import triton_python_backend_utils as pb_utils

from .chat import ChatParsers, NoParsers
from .request import TOO_DEEP, Mistake

PREFIX = "Error generating request: "
"""The prefix of Triton's model for the reason of a failed request."""
BROKEN = f"{PREFIX}the model's program failed; the server's log says how"
CANCELLED = "Request cancelled by client"
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ENGINE_DIED = 70


@dataclass(eq=False)
class RunningRequest:
    """One request in the engine; `result` is the library's object for it."""

    request_id: str
    is_cancelled: Callable[[], bool]
    result: Any
    aborted: bool = False

    def abort(self) -> None:
        """Abort it in the engine; its last output has the finish reason `cancelled`."""
        if not self.aborted:
            self.aborted = True
            try:
                self.result.abort()
            except Exception as error:  # noqa: BLE001 - the other requests must still be checked
                pb_utils.Logger.log_error("".join(traceback.format_exception(error)))


class AbortWatch:
    """Requests in the engine, aborted when they are cancelled; used in one event loop.

    Cancellation has no callback, so all requests are checked every `check_secs`, as on Triton,
    and never while there are none.
    """

    def __init__(self, check_secs: float) -> None:
        self._check_secs = check_secs
        self._running: set[RunningRequest] = set()
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def holding(self, running: RunningRequest) -> Iterator[RunningRequest]:
        """Check a request within the block; an exception in the block aborts it."""
        self._running.add(running)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._check())
        try:
            yield running
        except BaseException:
            running.abort()
            raise
        finally:
            self._running.discard(running)

    def stop(self, request_id: str) -> None:
        """Abort all requests of that id."""
        for running in tuple(self._running):
            if running.request_id == request_id:
                running.abort()

    async def _check(self) -> None:
        try:
            while self._running:
                await asyncio.sleep(self._check_secs)
                for running in tuple(self._running):
                    if running.is_cancelled():
                        running.abort()
        finally:
            self._watch = None


@dataclass(frozen=True)
class ModelContract:
    """Settings of the model's config for answers.

    `max_length` limits the tokens of prompt and answer together; None if unknown.
    """

    model: str
    decoupled: bool
    batched: bool
    max_length: int | None
    parsers: ChatParsers = field(default_factory=NoParsers)


@contextmanager
def answering(sender: Any) -> Iterator[None]:
    """Around one request: an exception becomes its error."""
    try:
        yield
    except Mistake as refusal:
        fail(sender, refusal)
    except RecursionError:  # only values of clients are read by recursion
        fail(sender, Mistake(f"the request cannot be read: {TOO_DEEP}"))
    except Exception as error:  # noqa: BLE001 - around one request
        pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
        fail(sender, Mistake(BROKEN, "INTERNAL"))


def fail(sender: Any, refusal: Mistake) -> None:
    """Send the error that ends a request."""
    error = pb_utils.TritonError(str(refusal), getattr(pb_utils.TritonError, refusal.code))
    sender.send(pb_utils.InferenceResponse(error=error), FINAL)


def end(error: BaseException) -> NoReturn:
    """End the process: the gateway fails its requests and starts another."""
    text = "".join(traceback.format_exception(error))
    print(f"the engine has died: {text}", flush=True)  # noqa: T201 - the gateway logs it
    os._exit(ENGINE_DIED)
