"""The command `sluice record`: golden requests from the requests of a running server's clients."""

import argparse
import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.errors import Code, InferenceError
from gateway.tools.management import ManagementClient

MODE = 0o600
"""The files have data of clients."""


def run(parsed: argparse.Namespace, environment: Mapping[str, str], console: Console) -> None:
    """Write the files as requests come, and show the count of dropped requests at the end.

    InferenceError if the server refuses, or none was recorded.
    """
    version = f"/versions/{quote(parsed.version, safe='')}" if parsed.version else ""
    path = f"/v2/models/{quote(parsed.model, safe='')}{version}/record"
    body = {"count": parsed.count, "secs": parsed.secs, "redact": parsed.redact}
    recording = _Recording(GoldenFolder(parsed.out), console, parsed.count)
    try:
        with recording.bar:
            for line in ManagementClient(parsed.url, environment).lines(path, body):
                recording.take(line)
    finally:
        if recording.begun:
            recording.show()
    if not recording.written:
        raise InferenceError(Code.UNAVAILABLE, f"no request of '{parsed.model}' was recorded")


class GoldenFolder:
    """A folder of golden requests, to which new ones are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = count(1)

    def add(self, golden: Mapping[str, Any], arrays: Mapping[str, str]) -> Path:
        """Write the files of one request under a new name; InferenceError if that fails.

        `arrays` are NPY files in base64. The JSON is the last, so that it is never incomplete.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            packed, incomplete, written = self._files(self._new_name())
            if arrays:
                file = io.BytesIO()
                np.savez_compressed(file, **{key: _array(text) for key, text in arrays.items()})
                _write(packed, file.getvalue())
            text = json.dumps(golden, ensure_ascii=False, indent=1)
            _write(incomplete, text.encode())
            incomplete.rename(written)
        except OSError as error:
            text = f"cannot write to '{self.path}': {error.strerror}"
            raise InferenceError(Code.UNAVAILABLE, text) from None
        return written

    def _new_name(self) -> str:
        names = (f"recorded-{number:04}" for number in self._numbers)
        return next(name for name in names if not any(map(Path.exists, self._files(name))))

    def _files(self, name: str) -> Sequence[Path]:
        """The arrays, the JSON until it is complete, and the JSON."""
        return [self.path / each for each in (f"{name}.npz", f".{name}.json", f"{name}.json")]


class _Recording:
    """The lines of one recording: files, and a bar in the terminal."""

    def __init__(self, folder: GoldenFolder, console: Console, wanted: int) -> None:
        self.bar = Progress(
            *(TextColumn("recorded"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            TextColumn("{task.fields[dropped]} dropped"),
            console=console,
        )
        self.written = 0
        self.begun = False
        self._folder = folder
        self._console = console
        self._task = self.bar.add_task("", total=wanted, dropped=0)
        self._dropped: Mapping[str, int] = {}
        self._end = "the connection ended"

    def take(self, line: Mapping[str, Any]) -> None:
        """Take a line of the server."""
        self.begun = True
        if "golden" in line:
            written = self._folder.add(line["golden"], line["arrays"])
            self.written += 1
            self.bar.console.print(str(written), markup=False, highlight=False, soft_wrap=True)
        else:
            self._dropped = line["dropped"]
            self._end = line.get("end", self._end)
        self.bar.update(self._task, completed=self.written, dropped=sum(self._dropped.values()))

    def show(self) -> None:
        """Show the result."""
        text = f"{self.written} recorded in {self._folder.path}: {self._end}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self._dropped:
            table = Table("dropped", "why")
            for why, number in sorted(self._dropped.items(), key=lambda each: -each[1]):
                table.add_row(str(number), why)
            self._console.print(table)


def _array(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
