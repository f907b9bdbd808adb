"""The speed of an answer, from times that the test says."""

import pytest

from gateway.tools.chat.answer import Pace
from gateway.tools.chat.server import AnswerPart


def test_before_the_first_token_it_says_how_long_we_wait() -> None:
    pace = Pace(10.0)
    pace.add(AnswerPart("", tokens=0), 11.0)
    assert pace.first_token_secs is None
    assert pace.summary(12.5) == "waiting 2.5 s"


def test_the_rate_is_of_the_tokens_behind_the_first_response() -> None:
    pace = Pace(10.0)
    pace.add(AnswerPart("a", tokens=3), 10.5)
    pace.add(AnswerPart("b", tokens=10), 11.5)
    pace.add(AnswerPart("c", tokens=10), 12.5)
    assert pace.first_token_secs == pytest.approx(0.5)
    assert pace.per_sec == pytest.approx(10.0)
    assert pace.summary(99.0) == "first token 0.50 s · 23 tokens · 10.0 tokens/s"


def test_one_response_has_no_rate() -> None:
    pace = Pace(0.0)
    pace.add(AnswerPart("all of it", tokens=3), 1.0)
    assert pace.per_sec is None
    assert pace.summary(2.0) == "first token 1.00 s · 3 tokens"


def test_what_comes_in_one_go_has_no_rate() -> None:
    pace = Pace(0.0)
    pace.add(AnswerPart("a", tokens=1), 1.0)
    assert pace.summary(1.0) == "first token 1.00 s · 1 token"
    pace.add(AnswerPart("b", tokens=99), 1.05)
    assert pace.per_sec is None
    assert pace.summary(2.0) == "first token 1.00 s · 100 tokens"


def test_a_model_that_does_not_count_has_responses_instead() -> None:
    pace = Pace(0.0)
    pace.add(AnswerPart("a"), 1.0)
    pace.add(AnswerPart("b"), 1.5)
    assert pace.summary(2.0) == "first token 1.00 s · 2 responses · 2.0 responses/s"


def test_tokens_without_text_count_as_the_first_ones_too() -> None:
    pace = Pace(0.0)
    pace.add(AnswerPart("", tokens=1), 0.25)
    pace.add(AnswerPart("ä", tokens=1), 0.75)
    assert pace.first_token_secs == 0.25
    assert pace.amount == 2


def test_an_answer_at_its_limit_is_said_to_be_cut_off() -> None:
    pace = Pace(0.0)
    pace.add(AnswerPart("a", 1), 1.0)
    pace.add(AnswerPart("", 0, "length"), 2.0)
    assert pace.summary(2.0).endswith("cut off at the limit of tokens")
