"""Lines of the audit log for changes over HTTP."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.frontends.http.request_scope import CHANGE, caller_in
from gateway.policy.areas import CHANGING, Area
from gateway.policy.audit import ABORTED, AuditedChange, AuditLog, action_of

FAILED = HTTPStatus.INTERNAL_SERVER_ERROR.value


class HttpAudit:
    """Adds a line for each request to a route that changes the server.

    The object of a change is what the path names, and what the route notes by `note_change`.
    """

    def __init__(self, log: AuditLog, area: Area, path: str) -> None:
        self._log = log
        self._area = area
        self._path = path
        self._action = action_of(path)

    def refused(self, scope: Scope, refusal: HTTPException) -> None:
        """Add the line of a request that a condition of the route refuses."""
        if scope["method"] == CHANGING:
            change, result = self._change(scope), str(refusal.status_code)
            self._log.add(change, result, refusal.detail, refused=True)

    async def handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route, and add the line of its answer."""
        if scope["method"] != CHANGING:
            await app(scope, receive, send)
            return
        answer = _Answer(send, lambda: self._log.add(self._change(scope)))
        try:
            await app(scope, receive, answer.send)
        except Exception:
            answer.fail()
            raise
        finally:
            if not answer.is_ok:
                self._log.add(self._change(scope), answer.result, answer.error)

    def _change(self, scope: Scope) -> AuditedChange:
        # uvicorn has no address of a client that has reset its connection.
        address, _ = scope.get("client") or ("", 0)
        return AuditedChange(
            area=self._area,
            action=self._action,
            by="client",
            about={**scope.get("path_params", {}), **scope.get("state", {}).get(CHANGE, {})},
            wire="http",
            route=self._path,
            address=address,
            caller=caller_in(scope),
        )


def note_change(scope: Scope, about: Mapping[str, Any]) -> None:
    """Note what a request changes, for the audit log."""
    scope.setdefault("state", {})[CHANGE] = about


class _Answer:
    """The answer of a route, sent on: its result, and the text of an error.

    `on_ok` is called before an answer without an error is sent, which may take hours.
    """

    def __init__(self, send: Send, on_ok: Callable[[], None]) -> None:
        self._send = send
        self._on_ok = on_ok
        self._status = 0
        self._body = b""

    def fail(self) -> None:
        """Note an unexpected error, whose answer another layer sends."""
        self._status = self._status or FAILED

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self.is_ok:
                self._on_ok()
        elif self._status >= 400:
            self._body += message.get("body", b"")
        await self._send(message)

    @property
    def is_ok(self) -> bool:
        return 0 < self._status < 400

    @property
    def result(self) -> str:
        return str(self._status) if self._status else ABORTED

    @property
    def error(self) -> str:
        with suppress(ValueError, LookupError, TypeError):
            return str(orjson.loads(self._body)["error"])
        return ""
