"""Checks of structures, since a wrong one breaks the engine that gets it.

Sizes are checked here; the rest by `compiling`, a process that may be stopped, or crash.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.request import Mistake

from .pattern_size import MOST_DEPTH, depth, size
from .sampling import Structure

PROGRAM = "from sluice_openvino_genai.compiling import main; main()"
FOLDERS = (str(Path(__file__).parents[1]),)
START_SECS = 120.0
MOST_WAIT_SECS = 30.0
"""For one structure; the system ends the process after much less of processor time."""
MOST_LETTERS = 64 << 10
MOST_STATES = 20_000
MOST_WIDE_STATES = 2_000
"""States that admit many letters take the library up to 2 ms each with 50,000 tokens."""
KEPT = 256


class StructureCheck:
    """Refuses wrong structures; the process is started by the first check. For one event loop."""

    def __init__(self) -> None:
        self._found: dict[Structure, str] = {}
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def knows(self, structure: Structure) -> bool:
        """Whether it has been checked; Mistake if it is wrong."""
        if wrong := self._found.get(structure):
            raise Mistake(wrong)
        return structure in self._found

    async def check(self, structure: Structure) -> None:
        """Mistake if the library cannot compile it, or takes too long."""
        async with self._turn:
            if self.knows(structure):
                return
            wrong = _too_large(structure) or await asyncio.to_thread(self._compiled, structure)
            self._found[structure] = wrong and f"{_name(structure)} {wrong}"
            if len(self._found) > KEPT:
                del self._found[next(iter(self._found))]
        self.knows(structure)

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _compiled(self, structure: Structure) -> str:
        """The end of a sentence about a structure that cannot be compiled, else ""; blocks."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process or self._started()
        try:
            _input(process).write(json.dumps([structure.kind, structure.text]).encode() + b"\n")
            _input(process).flush()
            return _answer(process, MOST_WAIT_SECS)
        except OSError:
            self.close()
            pb_utils.Logger.log_warn(f"structure check ended kind={structure.kind}")
            return "takes too long to compile, or too much memory: repeat and nest less in it"

    def _started(self) -> "subprocess.Popen[bytes]":
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*FOLDERS, *filter(None, sys.path)])},
        )
        try:
            _answer(process, START_SECS)
        except OSError as error:
            self.close()
            raise Mistake("the check of structures cannot be started", "UNAVAILABLE") from error
        return process


def _answer(process: "subprocess.Popen[bytes]", secs: float) -> str:
    """The next answer; OSError if the process ends, or takes longer."""
    output: Any = process.stdout
    if not select.select([output], [], [], secs)[0] or not (line := output.readline()):
        raise OSError("no answer")
    return str(json.loads(line))


def _input(process: "subprocess.Popen[bytes]") -> Any:
    return process.stdin


def _too_large(structure: Structure) -> str:
    """The end of a sentence about the size of a structure, "" if it is not too large."""
    letters = len(structure.text)
    if letters > MOST_LETTERS:
        return f"has {letters} characters, expected at most {MOST_LETTERS}"
    if (deepest := depth(structure.kind, structure.text)) > MOST_DEPTH:
        return f"has {deepest} nested brackets, expected at most {MOST_DEPTH}"
    states = size(structure.kind, structure.text)
    for found, most, noun in (
        (states.every, MOST_STATES, "states"),
        (states.wide, MOST_WIDE_STATES, "states that admit many letters"),
    ):
        if found > most:
            return f"has about {found} {noun}, expected at most {most}: repeat less in it"
    return ""


def _name(structure: Structure) -> str:
    return f"the structure of the answer ({structure.kind.replace('_', ' ')})"
