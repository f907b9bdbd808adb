"""Do the texts for an ensemble that makes no sense in itself come first things first?

Each text was compared with Triton 2.51; the configs are those of `tests/conformance/ensembles.py`.
"""

import pytest

from gateway.config.pbtxt import parse
from gateway.errors import Code, InferenceError
from gateway.models.normalisation import normalise
from tests.conformance.ensembles import SERVED, UNFIT, UNREADABLE


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_wrong_with_an_ensemble_is_told(name: str) -> None:
    config, problem = UNREADABLE[name]
    with pytest.raises(InferenceError) as caught:
        normalise(parse(config, f"{name}/config.pbtxt"), name)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, problem)


@pytest.mark.parametrize("name", [*SERVED, *UNFIT])
def test_an_ensemble_whose_data_flows_is_fine_in_itself(name: str) -> None:
    config = (SERVED | {key: text for key, (text, _) in UNFIT.items()})[name]
    assert normalise(parse(config, f"{name}/config.pbtxt"), name).platform == "ensemble"
