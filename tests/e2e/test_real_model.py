"""The real model: lines of the README, run as they are, and prompts that take seconds to read."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.figures import IN_FLIGHT, PROMPT_TOKENS, figures, wait_at_rest
from tests.e2e.llama import (
    ANSWER,
    ANSWER_SECS,
    ENDLESS,
    Llama,
    events,
    joined,
    long_text,
    streamed,
    write_llama,
)
from tests.e2e.streams import forgotten, ways
from tests.leaving import Moment, Way
from tests.raw import Connection
from tests.serving import ROOT, Serving, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

README = (ROOT / "README.md").read_text()
GENERATE_STREAM = "/v2/models/llama/generate_stream"
A_LONG_PROMPT = 1000
# Of the time in which the engine reads a long prompt, for one token of another stream.
LARGEST_PART = 0.5


@pytest.fixture(scope="module")
def laptop(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server as the README starts it."""
    repository = tmp_path_factory.mktemp("repository")
    write_llama(repository)
    with serving(repository, "--model-config-name=laptop") as started:
        yield started


@pytest.fixture
def servers(other_server: Serving, laptop: Serving) -> tuple[Serving, ...]:
    """Servers with the real model, by vLLM and by OpenVINO GenAI."""
    return other_server, laptop


def test_the_curl_line_of_the_readme_streams_the_answer_it_shows(
    servers: tuple[Serving, ...],
) -> None:
    shown = README.partition("```\ndata: ")[2].partition("\n")[0]
    for server in servers:
        line = code("sh", "curl").replace("localhost:8000", server.http)
        written = run("bash", "-c", line)
        assert written.partition("\n")[0] == f"data: {shown}"
        assert joined(events(written)) == ANSWER


def test_the_grpc_example_of_the_readme_prints_an_answer(servers: tuple[Serving, ...]) -> None:
    for server in servers:
        before = server.metric("nv_inference_request_success", "llama")
        program = code("python", "tritonclient.grpc").replace("localhost:8001", server.grpc)
        assert run(sys.executable, "-c", program).strip()
        assert server.metric("nv_inference_request_success", "llama") == before + 1


def code(language: str, word: str) -> str:
    """The block of code in the README that has this word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = [each for each in blocks if word in each]
    return str(found)


def run(*command: str) -> str:
    """The output of a program; it must end well."""
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=ANSWER_SECS
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("way", ways(Moment.BEFORE_THE_FIRST_ANSWER), ids=str)
def test_leaving_while_the_engine_reads_the_prompt(other_server: Serving, way: Way) -> None:
    before = figures(other_server)[PROMPT_TOKENS]
    asked = streamed(long_text(), **ENDLESS)
    with (
        Llama(other_server) as llama,
        forgotten(other_server, llama),
        way.leave(other_server, asked),
    ):
        wait_at_rest(other_server)
    assert 0 < figures(other_server)[PROMPT_TOKENS] - before < A_LONG_PROMPT


def test_a_long_prompt_does_not_hold_up_the_streams_of_others(servers: tuple[Serving, ...]) -> None:
    for server in servers:
        with Connection(server.ports["http"]) as other, Connection(server.ports["http"]) as long:
            other.ask(GENERATE_STREAM, streamed("Once upon a time", **ENDLESS).body)
            other.head()
            times = times_until_read(other, long)
        longest_gap = max(after - before for before, after in pairwise(times))
        assert longest_gap < (times[-1] - times[0]) * LARGEST_PART
        server.wait_metric(IN_FLIGHT, "llama", 0)


def times_until_read(other: Connection, long: Connection) -> list[float]:
    """The times of the tokens of a stream while the engine reads the prompt of another client."""
    times = [time.monotonic()]
    long.ask(GENERATE_STREAM, streamed(long_text(), **ENDLESS).body)
    with ThreadPoolExecutor(1) as pool:
        prompt_read = pool.submit(lambda: long.head() and long.chunk())
        while not prompt_read.done():
            assert other.chunk()
            times.append(time.monotonic())
        assert prompt_read.result()
    return times
