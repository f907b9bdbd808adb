"""Inferences without a valid key that arrive together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.api_keys import ApiKeys
from gateway.policy.credentials import Credentials
from tests.builders import soon
from tests.conftest import Serve
from tests.gateway.frontends.http.test_infer import BODY, ECHO, PATH, echo
from tests.gateway.frontends.http.test_infer_without_task import served
from tests.raw import post


async def test_refused_requests_that_come_together_are_answered_in_turns(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, turns = tmp_path / "keys.toml", list[int]()
    file.touch(0o600)
    credentials, check = Credentials(ApiKeys(file)), Credentials.check

    def checked(*arguments: Any) -> Any:
        turns.append(turn[0])
        return check(*arguments)

    turn = [0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turn[0] += 1

    monkeypatch.setattr(Credentials, "check", checked)
    async with served(serve(echo(), config=ECHO), credentials=credentials) as server:
        reader, writer = await server.connect()
        counting = asyncio.create_task(count())
        wrong = post(PATH, BODY, "x-api-key: wrong")
        last = post(PATH, BODY, "x-api-key: wrong", "Connection: close")
        writer.write(wrong + wrong + last + wrong)
        answers = await soon(reader.read())
        counting.cancel()
    assert answers.count(b"HTTP/1.1 401 ") == answers.count(b'{"error":') == 3
    assert answers.count(b"connection: close") == 1
    assert len(set(turns)) == len(turns) == 3
