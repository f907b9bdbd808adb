"""A Triton repository without files of newer features is answered byte for byte as before them."""

import json
from collections.abc import Mapping

import pytest

from tests.conformance.plain_answers import FLAGS, RECORDED, Answer, answers_of, write_models
from tests.serving import serving

pytestmark = pytest.mark.own_models("recorded answers")
DATA = json.loads(RECORDED.read_text())
"""The `answers` before there were rollouts, and those `changed` since, each with a `why`."""
SAME = [name for name in DATA["answers"] if name not in DATA["changed"]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Mapping[str, Answer]:
    """The answers of today."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    with serving(repository, *FLAGS) as server:
        return dict(answers_of(server))


@pytest.mark.parametrize("name", SAME)
def test_an_answer_is_byte_for_byte_that_of_before(
    answers: Mapping[str, Answer], name: str
) -> None:
    assert answers[name] == DATA["answers"][name]


@pytest.mark.parametrize("name", DATA["changed"])
def test_an_answer_that_differs_has_its_reason(answers: Mapping[str, Answer], name: str) -> None:
    changed = DATA["changed"][name]
    assert len(changed["why"]) > 20
    assert answers[name] == changed["answer"] != DATA["answers"][name]


def test_every_question_has_a_recorded_answer(answers: Mapping[str, Answer]) -> None:
    assert [*answers] == [*DATA["answers"]]
