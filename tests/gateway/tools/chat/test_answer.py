"""Answers on the screen: drawn while they grow, and complete once at the end."""

import asyncio
import io
import itertools
from collections.abc import Callable

import pytest
from rich.console import Console

from gateway.tools.chat.answer import LiveAnswer
from gateway.tools.chat.server import AnswerPart, Refused
from tests.gateway.tools.chat.screen import Screen
from tests.serving import wait_until

HEIGHT, WIDTH = 10, 70
LONG = "\n\n".join(f"Paragraph {number}\nhas two lines." for number in range(12))
CODE = "\n".join(["```", *(f"line {number}" for number in range(40)), "```"])


class Drawn:
    """A terminal that remembers all that was written to it."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=WIDTH, height=HEIGHT, highlight=False
        )

    @property
    def screen(self) -> str:
        """The text that it shows now."""
        screen = Screen(HEIGHT)
        screen.write(self.file.getvalue())
        return screen.text

    def wait_drawn(self, text: str) -> None:
        """Wait until a text has been drawn."""
        wait_until(lambda: text in self.screen, f"{text} is drawn")


@pytest.fixture
def drawn() -> Drawn:
    return Drawn()


def seconds() -> Callable[[], float]:
    """A clock by which every look is a second later."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def words(text: str) -> list[str]:
    """Without the signs of Markdown, and of what stands below an answer."""
    return [word for word in text.replace("```", "").split() if word != "•"]


@pytest.mark.parametrize("text", [LONG, CODE, "- a\n- b\n\nshort"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_every_line_is_there_once_also_of_what_is_longer_than_the_screen(
    drawn: Drawn, text: str, pieces: int
) -> None:
    size = len(text) // pieces + 1
    with LiveAnswer(drawn.console, seconds()) as live:
        for number in range(pieces):
            live.add(AnswerPart(text[number * size : (number + 1) * size], tokens=1))
            drawn.wait_drawn(f"{number + 1} token")
    answer, _, status = drawn.screen.rpartition("\n")
    assert words(answer) == words(text.replace("- ", ""))
    assert f"{pieces} token" in status


def test_on_a_narrow_terminal_nothing_is_left_over_of_what_was_drawn(drawn: Drawn) -> None:
    drawn.console.width = 20
    with LiveAnswer(drawn.console, seconds()) as live:
        live.add(AnswerPart("Hello", tokens=1))
        drawn.wait_drawn("Hello")
    assert drawn.screen.split()[:3] == ["Hello", "first", "token"]


def test_while_it_grows_its_end_and_its_pace_are_shown(drawn: Drawn) -> None:
    with LiveAnswer(drawn.console, seconds()) as live:
        live.add(AnswerPart(CODE.removesuffix("```"), tokens=41))
        drawn.wait_drawn("41 tokens")
        shown = drawn.screen.splitlines()
        assert len(shown) < HEIGHT
        assert "first token" in shown[-1]
        assert "41 tokens" in shown[-1]
        assert any("line 39" in line for line in shown)


def test_an_interrupted_answer_says_so_below_what_there_is_of_it(drawn: Drawn) -> None:
    live = LiveAnswer(drawn.console)
    live.add(AnswerPart("So far", tokens=2))
    with pytest.raises(asyncio.CancelledError), live:
        raise asyncio.CancelledError
    answer, status = drawn.screen.splitlines()
    assert answer == "So far"
    assert status.endswith("2 tokens · interrupted")


def test_an_error_speaks_for_itself(drawn: Drawn) -> None:
    with pytest.raises(Refused), LiveAnswer(drawn.console):
        raise Refused("no")
    assert drawn.screen == ""


def test_an_empty_answer_is_named(drawn: Drawn) -> None:
    with LiveAnswer(drawn.console) as live:
        live.add(AnswerPart("", tokens=0))
    assert drawn.screen == "the model had nothing to say"
