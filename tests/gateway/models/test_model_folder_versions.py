"""Version folders, and the versions that a policy selects."""

import pytest

from gateway.config import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from gateway.models.model_folder import select_versions, version_number


@pytest.mark.parametrize(
    ("folder", "number"),
    [("1", 1), ("0", 0), ("10", 10), ("9223372036854775807", 2**63 - 1)],
)
def test_a_folder_named_by_an_integer_is_a_version(folder: str, number: int) -> None:
    assert version_number(folder) == number


@pytest.mark.parametrize(
    "folder", ["01", "00", "abc", "v1", "1a", "1.5", "-1", "+3", " 1", "", "٣", "²", str(2**63)]
)
def test_any_other_folder_is_none(folder: str) -> None:
    assert version_number(folder) is None


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        (None, (10,)),
        (VersionPolicy(latest=LatestVersions(num_versions=1)), (10,)),
        (VersionPolicy(latest=LatestVersions(num_versions=2)), (9, 10)),
        (VersionPolicy(latest=LatestVersions(num_versions=4)), (1, 9, 10)),
        (VersionPolicy(latest=LatestVersions()), ()),
        (VersionPolicy(all=AllVersions()), (1, 9, 10)),
        (VersionPolicy(specific=SpecificVersions(versions=(9, 3, 1))), (1, 9)),
        (VersionPolicy(specific=SpecificVersions()), ()),
    ],
)
def test_a_policy_selects_versions_by_number_in_ascending_order(
    policy: VersionPolicy | None, selected: tuple[int, ...]
) -> None:
    assert select_versions(policy, (10, 1, 9)) == selected


def test_a_model_without_versions_has_none_to_serve() -> None:
    assert select_versions(None, ()) == ()
