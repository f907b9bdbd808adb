"""`sluice rollout wait` and tables of several servers, on states of which a test decides."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import cli
from gateway.errors import Code, InferenceError
from gateway.tools import rollout
from gateway.tools.management import ManagementClient

Row = dict[str, Any]
Answers = Callable[[Sequence[Row | InferenceError]], None]
STEP: Row = {
    "model": "m",
    "stable": 1,
    "candidate": 2,
    "state": "step",
    "reason": "version 2 is loaded",
    "weight": 10.0,
    "shadow": 0.0,
    "step": 1,
    "steps": [{}, {}],
    "spent_secs": 3725.0,
    "for_secs": 7200.0,
    "requests": 5,
    "min_requests": 100,
    "guardrails": [],
}
DOWN = InferenceError(Code.UNAVAILABLE, "no answer")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """The answers of servers, one after the other; the last one stays. Only sleep takes time."""

    def given(rows: Sequence[Row | InferenceError]) -> None:
        left = list(rows)

        def ask(client: ManagementClient, method: str, path: str, body: Any = None) -> Any:
            row = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(row, InferenceError):
                raise row
            return [row] if path == "/v2/rollouts" else row

        monkeypatch.setattr(ManagementClient, "ask", ask)

    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda secs: now.append(now.pop() + secs)
    )
    monkeypatch.setattr(rollout, "time", clock)
    return given


def run(*arguments: str) -> int:
    """Run `sluice rollout`; its exit status."""
    try:
        cli.main(["rollout", *arguments])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([STEP, {**STEP, "state": "promoted"}], 0),
        ([STEP, DOWN, {**STEP, "state": "promoted"}], 0),
        ([STEP, {**STEP, "state": "paused"}], 3),
        ([{**STEP, "state": "rolled_back"}], 4),
        ([STEP, {**STEP, "candidate": 3}], 4),
        ([{**STEP, "state": "waiting"}], 5),
        ([{"model": "m", "stable": None}], 1),
    ],
    ids=["promoted", "restarted", "paused", "rolled back", "superseded", "in time", "none"],
)
def test_the_exit_status_of_wait_is_the_end_of_the_rollout(
    answers: Answers, rows: Sequence[Row | InferenceError], status: int
) -> None:
    answers(rows)
    assert run("wait", "m", "--timeout=10s") == status


def test_a_table_of_several_servers_names_each(
    answers: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    guardrail = {"guardrail": "errors", "evidence": 1.0, "limit": 2.0, "breached": True}
    counts = {"requests": 50, "events": 5, "rate": 0.1}
    answers([{**STEP, "guardrails": [{**guardrail, "candidate": counts, "stable": counts}]}])
    assert run("status", "--url=http://a:1", "--url=http://b:2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("http://a:1" in line for line in lines) == 2
    assert any("http://b:2" in line and "1:02:05 of 2:00:00" in line for line in lines)
    assert any("broken, 10^1.0 of 10^2.0" in line and "5 of 50 (10.00%)" in line for line in lines)


def test_a_server_without_rollouts_has_no_table(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers([{"model": "m", "stable": None}])
    assert run("status", "m") == 0
    assert capsys.readouterr().out == "no rollouts\n"
