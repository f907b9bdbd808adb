"""Labels where requests are looked up."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.policy.caller import Caller
from gateway.request_name import RequestName
from tests.builders import read_all, soon, text_request
from tests.gateway.models.lifecycles import EXPLICIT
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write


@pytest.fixture
async def dataplane(tmp_path: Path, start: Start) -> AsyncIterator[DataPlane]:
    """A data plane over two versions of `a`, the first of which has a label."""
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    found = DataPlane(await start(startup=("a",), **EXPLICIT))
    found.set_labels("a", {"champion": 1})
    yield found
    found.threads.close()


def test_a_label_is_part_of_a_name_only_for_callers_of_its_model(dataplane: DataPlane) -> None:
    of_a, of_others = (Caller(models=re.compile(name)) for name in ("a", "b"))
    assert dataplane.model("a@champion", caller=of_a).version == "1"
    assert dataplane.has_label("a", "champion", of_a)
    assert dataplane.address("a@champion", caller=of_others) == ("a@champion", "")
    assert not dataplane.has_label("a", "champion", of_others)
    with pytest.raises(InferenceError, match="'a@champion' is not found"):
        dataplane.model("a@champion", caller=of_others)


def test_a_request_is_named_with_the_number_of_its_label(dataplane: DataPlane) -> None:
    named = RequestName("a", "1", "id")
    assert dataplane.numbered(RequestName("a@champion", "", "id")) == named
    assert dataplane.numbered(RequestName("a", "champion", "id")) == named
    for plain in (named, RequestName("a", "", "id"), RequestName("a@nope", "", "id")):
        assert dataplane.numbered(plain) == plain


async def test_a_request_for_a_label_that_has_moved_meanwhile_is_answered(
    dataplane: DataPlane, backend: ScriptedBackend
) -> None:
    looked_up = dataplane.model("a", "champion")
    dataplane.set_labels("a", {"champion": 2})
    await soon(dataplane.unload("a", frozenset({1})))
    with dataplane.infer(text_request(model="a", version="champion"), looked_up) as stream:
        (await backend.instances["a 2"][0].begun()).finish("by the second")
        assert await soon(read_all(stream)) == ["by the second"]


async def test_a_label_outlives_its_version_and_a_load(dataplane: DataPlane) -> None:
    await soon(dataplane.unload("a", frozenset({1})))
    with pytest.raises(InferenceError, match="is version 1, which is not loaded"):
        dataplane.model("a", "champion")
    await soon(dataplane.load("a"))
    assert dataplane.model("a", "champion").version == "1"
    await soon(dataplane.unload("a"))
    await soon(dataplane.load("a"))
    assert dataplane.labels("a") == {"champion": 1}
