"""Parts of the load test of changes: its storage, the ideal cache, and findings with bounds."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from loadtests.change import PARTS, change
from loadtests.change_residence import ideal_wakes
from loadtests.change_storage import write_object
from loadtests.support.findings import Finding
from loadtests.support.object_store import CONTINUED, LISTED, object_store, taken
from loadtests.support.servers import Server, serving

OBJECTS = 1005


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("storage")
    for number in range(OBJECTS):
        write_object(folder / "bucket" / "m" / f"{number}", content="0123456789")
    with serving(object_store(folder), frozenset()) as running:
        yield running


def read(storage: Server, path: str, **headers: str) -> bytes:
    url = f"http://127.0.0.1:{storage.ports.http}{path}"
    with urlopen(Request(url, headers=headers), timeout=20) as answer:
        content: bytes = answer.read()
    return content


def test_the_storage_counts_pages_of_listings_and_bytes_of_objects(storage: Server) -> None:
    taken(storage)
    first = read(storage, "/bucket?list-type=2&prefix=m/").decode()
    token = first.partition("<NextContinuationToken>")[2].partition("<")[0]
    second = read(storage, f"/bucket?list-type=2&prefix=m/&continuation-token={token}").decode()
    assert (first.count("<Key>"), second.count("<Key>")) == (1000, OBJECTS - 1000)
    assert read(storage, "/bucket/m/1", Range="bytes=2-4") == b"234"
    assert taken(storage) == {LISTED: 1, CONTINUED: 1, "bucket/m/1": 3}
    assert taken(storage) == {}


def test_an_ideal_cache_drops_the_model_that_was_used_least_recently() -> None:
    assert ideal_wakes("abaca", 2) == 3
    assert ideal_wakes("abab", 1) == 4


@pytest.mark.parametrize(
    ("least", "most", "verdict"),
    [(None, None, ""), (2, None, "holds"), (3, None, "fails"), (None, 1, "fails"), (2, 2, "holds")],
)
def test_a_finding_is_compared_with_its_bounds(
    least: float | None, most: float | None, verdict: str
) -> None:
    finding = Finding(figure="x", value=2, least=least, most=most)
    assert finding.verdict == verdict
    assert finding.holds is (verdict != "fails")


def test_the_command_fails_after_its_file_if_a_bound_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "poll", lambda *_: [Finding(figure="y", value=2, most=1)])
    to = tmp_path / "found.json"
    with pytest.raises(SystemExit):
        change(argparse.ArgumentParser("x change"), ["--parts", "poll", "--save-to", str(to)])
    assert "the bound fails for poll: y" in capsys.readouterr().err
    assert json.loads(to.read_text())
