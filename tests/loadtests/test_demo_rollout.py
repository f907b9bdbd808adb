"""The demonstration of a rollout in a short form."""

import argparse
import json
import re

import pytest

from loadtests.demo_rollout import demo_rollout


@pytest.mark.release
def test_the_version_that_errs_is_rolled_back_and_the_good_one_promoted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo_rollout(argparse.ArgumentParser(), ["--step-secs", "1"])
    lines = [json.loads(each) for each in re.findall(r"^\{.*\}$", capsys.readouterr().out, re.M)]
    assert [(each["action"], each["to"], each["by"]) for each in lines] == [
        ("rollout-rolled_back", 2, "guardrail:errors"),
        ("rollout-promoted", 3, "server"),
    ]
