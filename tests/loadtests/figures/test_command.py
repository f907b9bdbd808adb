"""`python -m loadtests all`: runs that are skipped, stopped, or stored."""

import argparse
import sys
import time
from pathlib import Path

import pytest

from loadtests.figures.claims import RUNS, Run
from loadtests.figures.command import command, ended, lacking

ASKED = argparse.Namespace(
    rounds=2,
    short=False,
    triton="triton --flag",
    perf_analyzer="",
    server_cpus="0",
    client_cpus="",
)


def test_a_run_without_its_peer_or_a_package_is_skipped_with_the_reason() -> None:
    assert lacking(Run(test="t", peers=["triton"]), ASKED) == ""
    assert lacking(Run(test="t", peers=["triton", "perf_analyzer"]), ASKED) == (
        "it needs --perf-analyzer"
    )
    assert lacking(Run(test="t", packages=["json", "no_such"]), ASKED) == "not installed: no_such"


def test_a_run_gets_the_options_of_the_machine() -> None:
    run = Run(test="t", arguments=["--a"], short=["--brief"], peers=["triton"])
    words = command(run, ASKED, Path("to.json"))
    assert words[1:] == [
        *("-m", "loadtests", "t", "--a", "--rounds", "2", "--save-to", "to.json"),
        *("--triton", "triton --flag", "--server-cpus", "0"),
    ]
    short = argparse.Namespace(**{**vars(ASKED), "short": True})
    assert "--brief" in command(run, short, Path("to.json"))


def test_a_run_beyond_its_limit_is_stopped() -> None:
    began = time.monotonic()
    assert ended([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None
    assert time.monotonic() - began < 30
    assert ended([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_command_of_a_run_has_no_path_of_a_machine(run: Run) -> None:
    assert "/" not in run.shell
