"""Rows of the index."""

from gateway.models.index import IndexRow, index_rows
from gateway.models.registry import ModelRegistry, VersionState, VersionStatus
from gateway.models.repository import ModelId


def test_models_and_versions_are_listed_in_order_with_what_is_known_of_them() -> None:
    registry = ModelRegistry()
    registry.get_or_add(ModelId("b")).versions = {
        2: VersionStatus(VersionState.UNAVAILABLE, "unloaded"),
        10: VersionStatus(VersionState.LOADING),
    }
    registry.get_or_add(ModelId("a")).trouble = "model appears in two or more repositories"
    registry.get_or_add(ModelId("uploaded")).versions = {1: VersionStatus(VersionState.READY)}
    registry.get_or_add(ModelId("removed")).versions = {
        1: VersionStatus(VersionState.UNAVAILABLE, "unloaded")
    }
    on_disk = [ModelId("never"), ModelId("b"), ModelId("a")]
    assert index_rows(registry, on_disk, lambda name: "") == [
        IndexRow("a", "", "UNAVAILABLE", "model appears in two or more repositories"),
        IndexRow("b", "2", "UNAVAILABLE", "unloaded"),
        IndexRow("b", "10", "LOADING", ""),
        IndexRow("never"),
        IndexRow("uploaded", "1", "READY", ""),
    ]
    assert index_rows(registry, on_disk, lambda name: "", ready=True) == [
        IndexRow("uploaded", "1", "READY", "")
    ]
