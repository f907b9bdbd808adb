"""The responses to one request, read by a thread; leaving them cancels."""

import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from gateway.errors import InferenceError
from gateway.in_process.handle import Link, caller
from gateway.in_process.request import Draft
from gateway.in_process.response import Response, responses_of
from gateway.in_process.sources import RemoteRequest, cancelled, post_if_running, single


class Responses(Iterator[Response]):
    """The responses to one request, for any thread but the server's own.

    Threads may share it: each response goes to one of them. Leaving cancels what is left: the end
    of a `with` block, `close`, and dropping the iterator, as a loop does that it was made for.
    """

    def __init__(self, link: Link, draft: Draft) -> None:
        self._link = link  # whoever may still read keeps the server
        self._request = RemoteRequest(link.home, draft)
        self._request_id = draft.request.id
        self._waiting: deque[Response] = deque()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked = False
        self._over = False
        self._cut = False
        self.owner = caller()
        self._ask()
        link.reads(self)

    def __next__(self) -> Response:
        with self._lock:
            while not self._cut:
                if self._waiting:
                    return self._waiting.popleft()
                if self._over:
                    raise StopIteration
                self._read()
        raise cancelled()

    def only(self) -> Response:
        """The one response of a request that has exactly one; INTERNAL if it has none or more."""
        with self:
            return single(list(islice(self, 2)))

    def close(self) -> None:
        """Cancel what is left, which later reads say; idempotent, and from any thread."""
        self._cut = self._cut or not self._over or bool(self._waiting)
        if not self._over:
            self._over = True
            post_if_running(self._link.home, self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._over:
            post_if_running(self._link.home, self._request)

    def _ask(self) -> None:
        self._link.home.post(self._link.home.ask, self._request.batch, self._answers.put)
        self._asked = True

    def _read(self) -> None:
        """Wait for the next batch; a wait that was interrupted goes on with the next read."""
        self.owner = caller()
        if not self._asked:
            self._ask()
        answer = self._answers.get()
        self._asked = False
        if isinstance(answer, InferenceError):
            self._over = True
            raise answer
        self._over = self._over or not answer or answer[-1].final
        self._waiting.extend(responses_of(answer, self._request_id))
