"""Models of an ensemble fit it, and one another. Texts were compared with Triton 2.51."""

from dataclasses import replace

import pytest

from gateway.config import ModelConfig, TensorReshape
from gateway.config.pbtxt import parse
from gateway.ensembles.checks import check_wiring
from gateway.errors import Code, InferenceError
from gateway.models.normalisation import normalise
from tests.conformance.ensembles import (
    BATCH_4,
    MEMBERS,
    SERVED,
    UNFIT,
    UNREADABLE,
    calls,
    ensemble,
    leaf,
    step,
)

DECOUPLED = {"dec_first", "dec_last", "dec_dec", "dec_fails", "says_not_decoupled"}


def config_of(name: str, text: str) -> ModelConfig:
    return normalise(parse(text, f"{name}/config.pbtxt"), name)


CONFIGS = {name: config_of(name, text) for name, text in MEMBERS.items()}
CONFIGS["many"] = CONFIGS["a"]
CONFIGS |= {name: config_of(name, text) for name, text in SERVED.items()}


def wired(config: ModelConfig) -> bool:
    """Whether the ensemble is decoupled; InferenceError if its members do not fit."""
    assert config.ensemble_scheduling is not None
    steps = config.ensemble_scheduling.step
    members = {(each.model_name, each.model_version): CONFIGS[each.model_name] for each in steps}
    return check_wiring(config, members)


@pytest.mark.parametrize("name", SERVED)
def test_members_that_fit_are_accepted_and_a_decoupled_one_makes_the_ensemble_so(name: str) -> None:
    assert wired(CONFIGS[name]) == (name in DECOUPLED)


@pytest.mark.parametrize("name", [name for name in UNFIT if not name.startswith("x_version")])
def test_members_that_do_not_fit_are_refused(name: str) -> None:
    text, problem = UNFIT[name]
    with pytest.raises(InferenceError) as caught:
        wired(config_of(name, text))
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, problem)


def test_outputs_of_one_decoupled_call_may_meet_again() -> None:
    CONFIGS["dec_ab"] = replace(
        config_of("dec_ab", leaf("AB", "PQ")),
        model_transaction_policy=CONFIGS["dec"].model_transaction_policy,
    )
    text = ensemble(
        step("dec_ab", {"A": "X", "B": "X"}, {"P": "l", "Q": "r"}),
        step("ab", {"A": "l", "B": "r"}, {"P": "Y"}),
    )
    assert wired(config_of("e", text))


def test_a_decoupled_call_behind_another_is_one_of_its_own() -> None:
    text = ensemble(
        calls("dec", "X", "m"),
        calls("dec2", "m", "k"),
        step("ab", {"A": "m", "B": "k"}, {"P": "Y"}),
    )
    with pytest.raises(InferenceError) as caught:
        wired(config_of("e", text))
    assert caught.value.message == (
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled "
        "models"
    )


def test_reshaped_tensors_are_compared_with_the_members_shapes() -> None:
    config = config_of("e", ensemble(calls("bat4", "X", "Y"), kind="INT32 1, 2", more=BATCH_4))
    with pytest.raises(InferenceError):
        wired(config)
    shape = TensorReshape(shape=(2,))
    wired(
        replace(
            config,
            input=tuple(replace(each, reshape=shape) for each in config.input),
            output=tuple(replace(each, reshape=shape) for each in config.output),
        )
    )


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_invalid_ensemble_is_refused(name: str) -> None:
    config, problem = UNREADABLE[name]
    with pytest.raises(InferenceError) as caught:
        normalise(parse(config, f"{name}/config.pbtxt"), name)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, problem)


@pytest.mark.parametrize("name", [*SERVED, *UNFIT])
def test_a_valid_ensemble_has_no_problems(name: str) -> None:
    config = (SERVED | {key: text for key, (text, _) in UNFIT.items()})[name]
    assert normalise(parse(config, f"{name}/config.pbtxt"), name).platform == "ensemble"
