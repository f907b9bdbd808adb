"""The condition of changes: this machine, or every machine, and no page of another origin."""

import pytest

from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.control import CHANGES, CONTROLLED, ChangeControl

LOCAL, REMOTE = Caller(local=True), Caller(local=False)
FOREIGN = Caller(local=False, foreign="Origin 'null'")
CLOSED, OPEN = ChangeControl(), ChangeControl(is_open=True)
EVERY = list(CHANGES)


@pytest.mark.parametrize("area", CONTROLLED)
def test_a_change_is_answered_to_this_machine_only(area: Area) -> None:
    assert CLOSED.refusal(area, LOCAL) is None
    assert CLOSED.refusal(area, REMOTE) == (
        f"{CONTROLLED[area]} is answered to this machine only; "
        "--open-control=true answers every machine, as Triton does"
    )


@pytest.mark.parametrize("area", CONTROLLED)
def test_an_open_server_answers_every_machine(area: Area) -> None:
    assert OPEN.refusal(area, LOCAL) is None
    assert OPEN.refusal(area, REMOTE) is None


@pytest.mark.parametrize("control", [CLOSED, OPEN])
def test_a_page_of_another_origin_is_refused_always(control: ChangeControl) -> None:
    expected = "changes are not answered to pages of another origin, found Origin 'null'"
    assert control.refusal(Area.LOGGING, FOREIGN) == expected
    expected = expected.replace("changes are", "the state of tenants and requests is")
    assert control.refusal(Area.ADMIN, FOREIGN) == expected


@pytest.mark.parametrize(
    ("control", "address", "restricted", "areas"),
    [
        (OPEN, "0.0.0.0", (), EVERY),
        (OPEN, "::", (), EVERY),
        (OPEN, "10.0.0.5", (), EVERY),
        (OPEN, "gateway.example", (), EVERY),
        (OPEN, "0.0.0.0", (Area.TRACE, Area.HEALTH), [each for each in EVERY if each != "trace"]),
        (OPEN, "0.0.0.0", EVERY, []),
        (OPEN, "127.0.0.1", (), []),
        (OPEN, "::1", (), []),
        (OPEN, "localhost", (), []),
        (OPEN, "unix:/run/sluice", (), []),
        (CLOSED, "0.0.0.0", (), []),
    ],
)
def test_the_open_areas_are_those_that_other_machines_reach_without_a_secret(
    control: ChangeControl, address: str, restricted: list[Area], areas: list[Area]
) -> None:
    assert list(control.open_areas(address, restricted)) == areas
