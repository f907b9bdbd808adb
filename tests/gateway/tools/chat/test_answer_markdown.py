"""Markdown from a model: nothing of it is lost, and nothing of it steers the terminal."""

import io

import pytest
from rich.console import Console

from gateway.tools.chat.answer import Answer, printable, whole_blocks

DOCUMENT = "# Title\n\nText *one*\ntwo.\n\n1. a\n\n2. b\n\n   more\n\n```py\nx = 1\n\ny\n```\n\nEnd"


def shown(text: str) -> str:
    console = Console(file=io.StringIO(), width=60)
    with console.capture() as capture:
        console.print(Answer(text))
    return capture.get()


def test_lines_stay_lines() -> None:
    assert shown("Roses are red,\nviolets are blue.") == "Roses are red,\nviolets are blue.\n"


@pytest.mark.parametrize("text", ["<think>aloud</think>", "a <b>c</b>", "<div>\nx\n</div>"])
def test_tags_are_text(text: str) -> None:
    assert shown(text).split() == text.split()


def test_a_link_says_where_it_leads() -> None:
    assert "https://example.org" in shown("[here](https://example.org)")


def test_control_characters_are_shown_as_replacements() -> None:
    assert printable("a\x1b[2Jb\x07\x9b\x7fc\td\ne\r\n") == "a�[2Jb���c\td\ne\n"
    assert "\x1b" not in shown("a\x1b]0;title\x07b `\x1b[2J`")


def test_only_the_last_block_can_still_grow() -> None:
    end = whole_blocks(DOCUMENT)
    assert DOCUMENT[end:] == "End"


@pytest.mark.parametrize(
    ("text", "growing"),
    [
        ("", ""),
        ("One line", "One line"),
        ("One\n\nTwo", "Two"),
        ("One\n\n1. a\n\n2. b\n", "1. a\n\n2. b\n"),
        ("One\n\n```\na\n\nb\n", "```\na\n\nb\n"),
        ("One\n\n> quoted\nmore", "> quoted\nmore"),
        ("Title\n", "Title\n"),
        ("One\u2028two\x0cthree\n\nFour", "Four"),
        ("\n\n", "\n\n"),
    ],
)
def test_a_block_is_whole_once_another_has_begun(text: str, growing: str) -> None:
    assert text[whole_blocks(text) :] == growing


def test_at_every_cut_the_blocks_are_what_they_are_in_the_whole() -> None:
    lines = [line for line in shown(DOCUMENT).splitlines() if line.strip()]
    for cut in range(len(DOCUMENT)):
        end = whole_blocks(DOCUMENT[:cut])
        parts = shown(DOCUMENT[:end]) + shown(DOCUMENT[end:])
        assert [line for line in parts.splitlines() if line.strip()] == lines
