"""Markdown on a terminal that loses nothing of the text, and cannot steer the terminal."""

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.markdown import Markdown

PARSER = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
"""Without HTML, which a terminal cannot show: so that tags are text, instead of being left out."""

CONTROLS = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}"),
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}


def printable(text: str) -> str:
    """The text without characters that a terminal obeys instead of showing them."""
    return text.translate(CONTROLS)


class Answer(Markdown):
    """Markdown from a model, whose lines stay lines."""

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", justify="default", hyperlinks=False)
        self.parsed = PARSER.parse(printable(text))
        for token in self.parsed:
            _keep_lines(token)


def whole_blocks(text: str) -> int:
    """How many characters at the beginning are blocks that nothing can be added to any more.

    What follows them, the block that still grows, can be rendered without them. The text must be
    printable: in others the parser sees more ends of lines than there are.
    """
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    last = starts[-1] if starts else 0
    return sum(len(line) + 1 for line in text.split("\n")[:last])


def _keep_lines(token: Token) -> None:
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
