"""The flag about CPU cores of instances."""

import argparse
import os

import pytest

from gateway.flags.devices import host_policies, host_policy


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})


def refusal(text: str) -> str:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        host_policy(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cores", "found"),
    [("0-0", {0}), ("0-99", {0, 1, 2, 5}), ("1-2,5-6", {1, 2, 5}), ("1-1,1-1", {1})],
)
def test_cores_are_ranges_of_those_that_the_process_has(cores: str, found: set[int]) -> None:
    assert host_policy(f"cpu,cpu-cores={cores}") == ("cpu", found)


@pytest.mark.parametrize("text", ["cpu", "cpu,", "cpu,cpu-cores", ",cpu-cores=0-1", ""])
def test_another_form_is_refused(text: str) -> None:
    assert refusal(text) == (
        f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}"
    )


@pytest.mark.parametrize("cores", ["0", "a-b", "", "0-1-2", "0-1,", "-1"])
def test_cores_that_are_no_range_are_refused(cores: str) -> None:
    assert "format is '<lower_cpu_core_id>-<upper_cpu_core_id>'" in refusal(
        f"cpu,cpu-cores={cores}"
    )


@pytest.mark.parametrize("cores", ["3-4", "2-1", "100-200"])
def test_cores_that_the_process_does_not_have_are_refused(cores: str) -> None:
    assert refusal(f"cpu,cpu-cores={cores}") == (
        f"host policy 'cpu' has no core that this process may use: 'cpu-cores' is {cores}, "
        "expected some of 0,1,2,5"
    )


def test_settings_other_than_cores_are_refused_by_name() -> None:
    assert refusal("cpu,numa-node=0") == (
        "setting 'numa-node' of host policy 'cpu' is not supported: name the cores of the node "
        "with 'cpu-cores'"
    )
    assert "Unsupported host policy setting 'foo'" in refusal("cpu,foo=1")


def test_the_last_setting_of_a_policy_counts() -> None:
    given = [host_policy("a,cpu-cores=0-0"), host_policy("a,cpu-cores=1-1")]
    assert host_policies(given) == {"a": {1}}
