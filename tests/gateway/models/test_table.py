"""What the index lists."""

from gateway.models.repository import ModelId
from gateway.models.table import IndexRow, ModelTable, State, Status, rows


def test_models_and_versions_are_listed_in_order_with_what_is_known_of_them() -> None:
    table = ModelTable()
    table.know(ModelId("b")).versions = {
        2: Status(State.UNAVAILABLE, "unloaded"),
        10: Status(State.LOADING),
    }
    table.know(ModelId("a")).trouble = "model appears in two or more repositories"
    table.know(ModelId("uploaded")).versions = {1: Status(State.READY)}
    table.know(ModelId("removed")).versions = {1: Status(State.UNAVAILABLE, "unloaded")}
    on_disk = [ModelId("never"), ModelId("b"), ModelId("a")]
    assert rows(table, on_disk, ready=False) == [
        IndexRow("a", "", "UNAVAILABLE", "model appears in two or more repositories"),
        IndexRow("b", "2", "UNAVAILABLE", "unloaded"),
        IndexRow("b", "10", "LOADING", ""),
        IndexRow("never"),
        IndexRow("uploaded", "1", "READY", ""),
    ]
    assert rows(table, on_disk, ready=True) == [IndexRow("uploaded", "1", "READY", "")]
