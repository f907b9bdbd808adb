"""The parameter that asks for a resumable stream; no model sees it."""

from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.resumption.wish import without_wish
from tests.builders import text_request


def test_a_request_that_asks_for_nothing_is_left_alone() -> None:
    request = text_request(parameters={"temperature": 0})
    assert without_wish(request) == (request, False)
    assert without_wish(request)[0] is request


@pytest.mark.parametrize("wish", [True, False])
def test_the_model_does_not_see_the_wish(wish: bool) -> None:
    asked = text_request(parameters={"temperature": 0, "resumable": wish})
    assert without_wish(asked) == (text_request(parameters={"temperature": 0}), wish)


@pytest.mark.parametrize("wish", ["true", 1, 0.0, None, []])
def test_a_wish_that_is_no_truth_value_is_refused(wish: Any) -> None:
    with pytest.raises(
        InferenceError, match=r"parameter 'resumable' is .* expected true"
    ) as caught:
        without_wish(text_request(parameters={"resumable": wish}))
    assert caught.value.code is Code.INVALID_ARG
