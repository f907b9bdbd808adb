"""perf_analyzer is a program like any other: it may fail, and it may never end."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.support import triton
from loadtests.support.servers import LoadTestFailed, Ports, Server
from loadtests.support.triton import TRIES, Measurement, Traffic, measure

SERVER = Server("gateway", 0, Ports(8000, 8001, 8002))
TRAFFIC = Traffic(model="m", wire="grpc", clients=8)
REPORT = """\
for last; do :; done
echo "Concurrency,Inferences/Second,p50 latency,p99 latency" > "$last"
echo "8,1234.5,10,20" >> "$last"
"""
HANG = '(echo started; exec sleep 1000) > "$0.held" & wait\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The program that stands for perf_analyzer."""
    return tmp_path / "analyzer"


@pytest.fixture
def held(script: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe that what hangs keeps open; beyond a second it counts as hanging."""
    monkeypatch.setattr(triton, "START_SECS", 1.0)
    os.mkfifo(script.with_suffix(".held"))
    pipe = os.open(script.with_suffix(".held"), os.O_RDONLY | os.O_NONBLOCK)
    yield pipe
    os.close(pipe)


def run(script: Path, text: str) -> Measurement:
    script.write_text(text)
    asked = argparse.Namespace(perf_analyzer=f"sh {script}", window_secs=0.0)
    return measure(asked, TRAFFIC, SERVER)


def read_to_end(pipe: int) -> bytes:
    """The text in the pipe; it ends when all its writers have ended."""
    os.set_blocking(pipe, True)
    with open(pipe, "rb", closefd=False) as reader:
        return reader.read()


def test_a_report_is_read(script: Path) -> None:
    found = run(script, REPORT)
    assert (found.per_sec, found.p50_us, found.p99_us) == (1234.5, 10, 20)


def test_its_output_is_shown_when_it_fails(script: Path) -> None:
    with pytest.raises(LoadTestFailed, match=r"perf_analyzer failed:\nno such model"):
        run(script, "echo no such model >&2; exit 3\n")


def test_one_that_hangs_is_killed_with_its_children_and_tried_again(
    script: Path, held: int
) -> None:
    text = f'if mkdir "$0.tried" 2> /dev/null; then\n{HANG}fi\n{REPORT}'
    assert run(script, text).per_sec == 1234.5
    assert read_to_end(held) == b"started\n"


def test_one_that_hangs_each_time_fails_the_load_test(script: Path, held: int) -> None:
    with pytest.raises(LoadTestFailed) as failed:
        run(script, HANG)
    assert str(failed.value) == (
        f"perf_analyzer was stopped {TRIES} times: model 'm', grpc, 8 clients, expected it to end "
        "within 1 s"
    )
    assert read_to_end(held) == b"started\n" * TRIES
