"""`sluice record`: `sluice check --golden` reads what it writes; it ends with its client."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli import main
from gateway.models.golden_results import GoldenOutcome
from gateway.tools.golden import check_golden
from tests.conformance.models import identity
from tests.raw import Connection
from tests.serving import Serving, serving, wait_until, write_model

pytestmark = [
    pytest.mark.runs_on("frontends"),
    pytest.mark.own_models("recordings"),
]

LONG = 2000
PATH = "/v2/models/{}/record"
BEGUN, ENDED = "recording begun", "recording ended"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "models"
    write_model(folder, "text", identity("BYTES", "1"))
    write_model(folder, "numbers", identity("FP32"))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    audit = f"--audit-log={repository.parent / 'audit.log'}"
    with serving(repository, "--allow-record=true", audit) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://localhost:{server.ports['http']}", timeout=20) as client:
        yield client


def infer(http: httpx.Client, model: str, datatype: str, data: Sequence[Any]) -> None:
    tensor = {"name": "INPUT", "datatype": datatype, "shape": [len(data)], "data": data}
    assert http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]}).status_code == 200


@contextmanager
def recording(
    server: Serving, model: str, out: Path, *options: str, status: int = 0
) -> Iterator[None]:
    """`sluice record` in a thread, which has begun inside; it ends with that status."""
    url = f"http://localhost:{server.ports['http']}"
    ended: list[object] = []

    def run() -> None:
        try:
            main(["record", model, f"--out={out}", f"--url={url}", *options])
            ended.append(0)
        except SystemExit as error:
            ended.append(error.code)

    before = server.text.count(BEGUN)
    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: server.text.count(BEGUN) > before or bool(ended), "the recording has begun")
    yield
    thread.join(20)
    assert ended == [status]


def test_what_is_recorded_passes_without_a_change(
    server: Serving, http: httpx.Client, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "text": ("BYTES", [["Capital of Älta?"], ["call Ann"]]),
        "numbers": ("FP32", [[1.5, -0.1], [n / 7 for n in range(LONG)]]),
    }
    for model, (datatype, requests) in asked.items():
        out = repository / model / "golden"
        with recording(server, model, out, "--count=2", "--redact=Ann"):
            for number, data in enumerate(requests, 1):
                infer(http, model, datatype, data)
                wait_until(
                    lambda: (out / f"recorded-{number:04}.json").exists(),  # noqa: B023
                    "it is written",
                )
        assert "all are recorded" in capsys.readouterr().out
    rows = check_golden(repository, repository / "store", "")
    assert [(row.model, row.result.name, row.result.outcome) for row in rows] == [
        ("numbers", "recorded-0001", GoldenOutcome.PASSED),
        ("numbers", "recorded-0002", GoldenOutcome.PASSED),
        ("text", "recorded-0001", GoldenOutcome.PASSED),
        ("text", "recorded-0002", GoldenOutcome.PASSED),
    ]
    folder = repository / "numbers" / "golden"
    files = sorted(each.name for each in folder.iterdir())
    assert files == ["recorded-0001.json", "recorded-0002.json", "recorded-0002.npz"]
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    texts = [each.read_text() for each in (repository / "text" / "golden").iterdir()]
    assert not any("Ann" in each for each in texts)
    assert http.get("/v2/models/numbers/stats").json()["model_stats"][0]["inference_count"] == 2


def test_the_dropped_ones_are_counted_and_no_file_is_overwritten(
    server: Serving, http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recorded-0001.npz").write_text("mine")
    sequence = {"parameters": {"sequence_id": 7, "sequence_start": True}}
    tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    with recording(server, "text", tmp_path, "--count=1"):
        http.post("/v2/models/text/infer", json={"inputs": [tensor], **sequence})
        infer(http, "text", "BYTES", ["b"])
    shown = capsys.readouterr().out
    assert "of a sequence or a conversation" in shown
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "recorded-0001.npz",
        "recorded-0002.json",
    ]


def test_a_recording_without_a_request_fails(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording(server, "text", tmp_path, "--for=1s", status=1):
        pass
    assert "no request of 'text' was recorded" in capsys.readouterr().err


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_recording_ends_at_once_with_its_client(server: Serving, leave: str) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask(PATH.format("text"), {})
        assert connection.head().status == 200
        assert json.loads(connection.chunk()) == {"recorded": 0, "dropped": {}}
        before = server.text.count(ENDED)
        getattr(connection, leave)()
    wait_until(lambda: server.text.count(ENDED) > before, "the recording has ended", 1)


def test_the_audit_log_has_a_recording_from_its_beginning(
    server: Serving, repository: Path
) -> None:
    log = repository.parent / "audit.log"

    def lines() -> list[dict[str, Any]]:
        found = map(json.loads, log.read_text().splitlines())
        return [each for each in found if each.get("count") == 7]

    ended = server.text.count(ENDED)
    with Connection(server.ports["http"]) as connection:
        connection.ask(PATH.format("numbers"), {"count": 7, "redact": "Ann"})
        connection.head()
        wait_until(lambda: bool(lines()), "it has a line")
    wait_until(lambda: server.text.count(ENDED) > ended, "the next test finds no line of this one")
    (found,) = lines()
    assert (found["action"], found["model"], found["redacted"]) == ("record", "numbers", True)
    assert found["result"] == "ok"
    assert "Ann" not in json.dumps(found)


def test_a_server_without_the_option_refuses(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(repository) as refusing:
        url = f"http://localhost:{refusing.ports['http']}"
        with pytest.raises(SystemExit):
            main(["record", "text", f"--out={tmp_path}", f"--url={url}"])
    assert "--allow-record=true" in capsys.readouterr().err
