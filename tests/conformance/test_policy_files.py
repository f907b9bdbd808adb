"""Log and trace files that clients name, with `--log-directory`."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.clients import Client, connect
from tests.conformance.models import identity
from tests.serving import Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("frontends")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "echo", identity("BYTES", "1"))
    with serving(models, f"--log-directory={folder}", "--trace-config=rate=1") as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    async with connect(server, request.param) as found:
        yield found


async def test_the_log_is_written_to_the_named_file(
    client: Client, server: Serving, folder: Path, request: pytest.FixtureRequest
) -> None:
    file = folder / f"{request.node.callspec.id}.log"
    await client.call("update_log_settings", {"log_file": file.name})
    await asyncio.to_thread(httpx.get, f"{server.http}/v2/models/first_unknown")
    wait_until(lambda: "first_unknown" in file.read_text(), "the file has the line")
    await client.call("update_log_settings", {"log_file": str(file)})
    await client.call("update_log_settings", {"log_file": ""})
    await asyncio.to_thread(httpx.get, f"{server.http}/v2/models/second_unknown")
    server.wait_logged("second_unknown")
    assert "first_unknown" not in server.text
    assert "second_unknown" not in file.read_text()


async def test_traces_are_written_to_the_named_file(
    client: Client, server: Serving, folder: Path, request: pytest.FixtureRequest
) -> None:
    file = folder / f"{request.node.callspec.id}.json"
    on = {"trace_file": file.name, "trace_level": ["TIMESTAMPS"], "log_frequency": "1"}
    await client.call("update_trace_settings", None, on)
    url = f"{server.http}/v2/models/echo/generate"
    answer = await asyncio.to_thread(httpx.post, url, json={"INPUT": "x"})
    assert answer.status_code == 200
    numbered = file.with_name(f"{file.name}.0")
    wait_until(numbered.exists, "the file is written")
    assert json.loads(numbered.read_text())
    off = {"trace_level": ["OFF"], "trace_file": str(file)}
    await client.call("update_trace_settings", None, off)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "x\n", "."])
async def test_other_files_are_refused(client: Client, folder: Path, name: str) -> None:
    text = "expected a file below the folder of --log-directory"
    code, found = await client.refusal("update_log_settings", {"log_file": name})
    assert (code, found.endswith(text)) == (client.code("INVALID_ARGUMENT"), True)
    code, found = await client.refusal("update_trace_settings", None, {"trace_file": name})
    assert (code, found.endswith(text)) == (client.code("INVALID_ARGUMENT"), True)
    assert str(folder) not in found
