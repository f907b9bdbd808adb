"""`sluice check` finds the problems of an ensemble before a server does."""

import pytest

from gateway.models.repository import ModelRepository
from gateway.models.supported_fields import FieldVerdict
from gateway.tools.check import check
from tests.conformance.ensembles import (
    SERVED,
    UNFIT,
    UNLOADED,
    UNREADABLE,
    calls,
    ensemble,
    write_ensembles,
)
from tests.serving import write_model

ONLY_LOADING_TELLS = ("x_badload", "x_badens", "x_dec_cached")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The reason why each model is refused; the models of the conformance tests, and some more."""
    folder = tmp_path_factory.mktemp("checked")
    write_ensembles(folder)
    write_model(folder, "x_absent", ensemble(calls("absent", "X", "m"), calls("gone", "m", "Y")))
    write_model(folder, "of_bad", ensemble(calls("x_nostep", "X", "Y")))
    write_model(folder, "untold", 'backend: "onnxruntime"\n')
    write_model(folder, "of_untold", ensemble(calls("untold", "X", "Y")))
    found: dict[str, list[str]] = {}
    for each in check(ModelRepository((folder,))):
        if each.verdict is FieldVerdict.REFUSED:
            found.setdefault(each.model, []).append(each.why)
    return found


def test_every_problem_of_the_configs_has_the_text_of_the_load(
    refusals: dict[str, list[str]],
) -> None:
    expected = {name: [text] for name, (_, text) in (UNREADABLE | UNFIT | UNLOADED).items()}
    for name in ONLY_LOADING_TELLS:
        del expected[name]
    expected["x_absent"] = [
        "ensemble x_absent contains models that are not available or ambiguous: absent, gone"
    ]
    assert refusals == expected


def test_ensembles_that_serve_are_not_refused(refusals: dict[str, list[str]]) -> None:
    assert refusals.keys().isdisjoint({*SERVED, "of_bad", "of_untold"})
