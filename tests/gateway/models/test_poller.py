"""What polling finds changed."""

from gateway.models.poller import Changes, compare
from gateway.models.repository import ModelId

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
OLD, NEW = {"1/": (0, -1)}, {"1/": (0, -1), "1/model": (5, 1)}


def test_what_is_as_it_was_is_left_alone() -> None:
    assert compare({A: OLD}, {A: dict(OLD)}, [A]) == Changes()


def test_what_is_new_or_modified_is_loaded_and_what_is_gone_unloaded() -> None:
    found = compare({A: OLD, C: OLD}, {A: NEW, B: OLD}, [A, C])
    assert found == Changes(load={A: NEW, B: OLD}, unload=(C,))


def test_what_was_unloaded_is_loaded_when_it_is_there_again() -> None:
    assert compare({A: None}, {A: OLD}, []) == Changes(load={A: OLD})


def test_what_failed_is_tried_again_only_when_it_has_changed() -> None:
    assert compare({A: OLD}, {A: OLD}, []) == Changes()
    assert compare({A: OLD}, {A: NEW}, []) == Changes(load={A: NEW})
