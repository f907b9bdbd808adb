"""Lines of the audit log for answers over HTTP that are odd, or missing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.frontends.http.audit import HttpAudit, note_change
from gateway.policy.areas import Area
from gateway.policy.audit import AuditLog


def lines(log: AuditLog, file: Path) -> list[dict[str, Any]]:
    log.open()
    log.close()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def log(file: Path) -> AuditLog:
    return AuditLog(file)


async def handle(log: AuditLog, app: ASGIApp, **scope: Any) -> list[Message]:
    """Have a route answer; the messages that are sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asked: Scope = {"type": "http", "method": "POST", "client": None, "headers": [], **scope}
    await HttpAudit(log, Area.LOGGING, "/v2/logging").handle(app, asked, receive, send)
    return sent


@pytest.mark.parametrize(
    ("answer", "result", "error"),
    [
        (Response(status_code=204), "ok", None),
        (PlainTextResponse("no", 405), "405", None),
        (Response(b'["no"]', 400), "400", None),
        (Response(b'{"error":["no"]}', 400), "400", "['no']"),
        (Response(b"", 413), "413", None),
    ],
)
async def test_an_answer_without_the_form_of_errors_has_its_status(
    log: AuditLog, file: Path, answer: Response, result: str, error: str | None
) -> None:
    sent = await handle(log, answer)
    assert sent[0]["status"] == answer.status_code
    (found,) = lines(log, file)
    assert (found["result"], found.get("error"), found["address"]) == (result, error, "")


@pytest.mark.parametrize(
    ("end", "result"), [(asyncio.CancelledError, "aborted"), (RuntimeError, "500")]
)
async def test_a_route_without_an_answer_is_aborted_or_has_failed(
    log: AuditLog, file: Path, end: type[BaseException], result: str
) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        note_change(scope, {"settings": {"a": 1}})
        raise end

    with pytest.raises(end):
        await handle(log, fail, path_params={"model": "m"})
    (found,) = lines(log, file)
    assert (found["result"], found["model"], found["settings"]) == (result, "m", {"a": 1})


def test_a_refused_request_with_another_method_has_no_line(log: AuditLog, file: Path) -> None:
    audit = HttpAudit(log, Area.LOGGING, "/v2/logging")
    for method in ("GET", "POST"):
        audit.refused({"method": method, "client": ("::1", 5)}, HTTPException(403, "no"))
    (found,) = lines(log, file)
    assert (found["result"], found["error"], found["address"]) == ("403", "no", "::1")
