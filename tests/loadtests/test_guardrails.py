"""The simulation of guardrails in short runs: false alarms, and requests until an alarm."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests import guardrails
from loadtests.guardrails import ALARMS, FALSE_ALARMS, SHARE_OF_ALPHA, Scenario, simulate


def alarms(scenario: Scenario, runs: int, alpha: float = guardrails.ALPHA) -> list[int]:
    """The requests until the alarms, sorted."""
    found = [simulate(scenario, seed, alpha) for seed in range(runs)]
    return sorted(alarm.requests for alarm in found if alarm is not None)


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_a_candidate_as_good_as_stable_is_no_alarm(name: str) -> None:
    assert alarms(replace(FALSE_ALARMS[name], requests=6000), 1) == []


@pytest.mark.parametrize(
    ("name", "limit"), [(name, limit) for name, (_, limit) in ALARMS.items() if limit is not None]
)
def test_a_worse_candidate_is_an_alarm_within_its_limit(name: str, limit: int) -> None:
    found = alarms(ALARMS[name][0], 20, SHARE_OF_ALPHA)
    assert found[10] <= limit


def test_blocks_by_admission_keep_slow_answers_from_an_alarm() -> None:
    """By completion the first requests that end on the candidate after a step are its errors."""
    scenario = Scenario(0.02, 0.02, (0.02, 0.5), 5000, rate=500, answer_secs=5)
    assert alarms(scenario, 3) == []


def test_the_command_writes_its_table_and_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "1 -> 100 %, weight 10"
    monkeypatch.setattr(guardrails, "ALARMS", {name: ALARMS[name]})
    monkeypatch.setattr(guardrails, "FALSE_ALARMS", {"1 %": Scenario(0.01, 0.01, requests=500)})
    parser = argparse.ArgumentParser()
    guardrails.guardrails(
        parser, ["--runs", "1", "--null-runs", "1", "--save-to", str(tmp_path / "found.json")]
    )
    assert name in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())
