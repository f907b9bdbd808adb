"""A model has the same state in a folder and in a bucket."""

from pathlib import Path

import pytest

from gateway.models.homes import home_of
from tests.gateway.models.mirrored import Open
from tests.remote_stores import MemoryStore


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_the_plan_of_rollouts_is_no_part_of_the_state_of_a_model(
    place: str, tmp_path: Path, mirror_of: Open
) -> None:
    bucket, folder = MemoryStore(), tmp_path / "models"
    for key in ("m/1/weights", "m/config.pbtxt", "m/rollout.json"):
        bucket.put(key)
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).touch()
    home = home_of(folder if place == "folder" else mirror_of(bucket))
    assert {each for each in home.snapshot("m") if not each.endswith("/")} == {
        *("1/weights", "config.pbtxt")
    }
