"""One HTTP exchange driven by hand: the test is the client, as slow or as rude as it likes."""

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from starlette.types import ASGIApp, Message, Scope

from gateway.frontends.http.request_scope import WATCH
from tests.builders import soon


class Exchange:
    """Inside `async with` the application answers; leaving it means that the client leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str = "/",
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self._app = app
        self.scope = _scope(path, method)
        every = {"content-type": "application/json", **(headers or {})}
        self.scope["headers"] = [(k.encode(), v.encode()) for k, v in every.items()]
        self.scope["state"] = {WATCH: self._watch}
        self._leave: Callable[[], None] | None = None
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._app(self.scope, self._receive, self._send))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reads.set()
        self.leave()
        await self.ended()

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()
        if self._leave is not None:
            self._leave()

    def stop_server(self) -> None:
        """Cancel the exchange from the server's side."""
        assert self._task is not None
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until the application is done with this exchange."""
        assert self._task is not None
        await soon(asyncio.wait([self._task]))

    @property
    def ended_by_itself(self) -> bool:
        """Whether the application is done with this exchange."""
        assert self._task is not None
        return self._task.done()

    @property
    def started(self) -> bool:
        """Whether anything has been sent that the test has not taken."""
        return not self._sent.empty()

    async def start(self) -> tuple[int, dict[str, str]]:
        """The status and the headers."""
        message = await soon(self._sent.get())
        assert message["type"] == "http.response.start"
        return message["status"], {k.decode(): v.decode() for k, v in message["headers"]}

    async def chunk(self) -> bytes:
        """The bytes of one write; empty at the end of a streamed body."""
        found: bytes = (await self._body_message())["body"]
        return found

    async def rest(self) -> bytes:
        """The body to its end."""
        chunks, more = [], True
        while more:
            message = await self._body_message()
            chunks.append(message["body"])
            more = message["more_body"]
        return b"".join(chunks)

    async def _body_message(self) -> Message:
        message = await soon(self._sent.get())
        assert message["type"] == "http.response.body"
        found = {"body": message.get("body", b""), "more_body": message.get("more_body", False)}
        assert found["body"] or not found["more_body"], "a write without a byte"
        return found

    def _watch(self, leave: Callable[[], None] | None) -> None:
        self._leave = leave
        if leave is not None and self._gone.is_set():
            leave()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self._sent.put_nowait(message)


def _scope(path: str, method: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
