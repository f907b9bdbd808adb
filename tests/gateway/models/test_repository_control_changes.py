"""Changes that a poll finds."""

from gateway.models.repository import ModelId
from gateway.models.repository_control import Changes, compare

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
OLD, NEW = {"1/": (0, -1)}, {"1/": (0, -1), "1/model": (5, 1)}


def test_an_unchanged_folder_is_not_loaded() -> None:
    assert compare({A: OLD}, {A: dict(OLD)}, [A]) == Changes()


def test_new_and_modified_folders_are_loaded_and_removed_ones_unloaded() -> None:
    found = compare({A: OLD, C: OLD}, {A: NEW, B: OLD}, [A, C])
    assert found == Changes(load={A: NEW, B: OLD}, unload=(C,))


def test_an_unloaded_model_is_loaded_when_its_folder_is_back() -> None:
    assert compare({A: None}, {A: OLD}, []) == Changes(load={A: OLD})


def test_a_failed_load_is_retried_only_after_a_change() -> None:
    assert compare({A: OLD}, {A: OLD}, []) == Changes()
    assert compare({A: OLD}, {A: NEW}, []) == Changes(load={A: NEW})
