"""A terminal's screen after all output, with the lines that have scrolled out."""

import re

TOKEN = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<name>[A-Za-z])|(?P<one>[\s\S])")


class Screen:
    """Knows as much of a terminal as the chat uses: lines, carriage returns, moving up, erasing."""

    def __init__(self, height: int) -> None:
        self._height = height
        self._lines = [""]
        self._row = self._column = 0

    @property
    def text(self) -> str:
        """Everything from the first line on, also what has scrolled out."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip()

    def write(self, written: str) -> None:
        """Do what a program's output says."""
        for token in TOKEN.finditer(written):
            if token["one"]:
                self._put(token["one"])
            else:
                self._obey(token["name"], token["arguments"])

    def _put(self, one: str) -> None:
        if one == "\r":
            self._column = 0
        elif one == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
        else:
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + one + line[self._column + 1 :]
            self._column += 1

    def _obey(self, name: str, arguments: str) -> None:
        if name == "A":
            # What has scrolled out at the top is out of the cursor's reach.
            top = max(len(self._lines) - self._height, 0)
            self._row = max(self._row - int(arguments or 1), top)
        elif name == "K":
            assert arguments == "2"
            self._lines[self._row] = ""
        else:
            assert name in "mhl", f"unknown control sequence {arguments}{name}"
