"""Every command of the load tests is a function, and a row of the page."""

import importlib
import subprocess
import sys

import pytest

from loadtests.__main__ import COMMANDS
from tests.serving import ROOT

PAGE = (ROOT / "loadtests" / "README.md").read_text()
OWN_TARGETS = ("soak", "gpu_check", "profile", "demo_rollout")
"""The commands that `make` knows by their names."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_its_module(name: str) -> None:
    module = importlib.import_module(f"loadtests.{COMMANDS[name].module}")
    assert callable(getattr(module, name))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_names_the_command(name: str) -> None:
    target = {name: "make " + name.replace("_", "-") for name in OWN_TARGETS}
    assert target.get(name, f"TEST={name}") in PAGE


def test_the_help_lists_every_command_without_packages() -> None:
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "loadtests", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        cwd=ROOT,
    )
    assert [name for name in COMMANDS if f"  {name} " not in ended.stdout] == []
