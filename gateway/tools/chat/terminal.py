"""The chat at a terminal: keyboard, prompt, growing answers and Ctrl-C."""

import asyncio
import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from types import FrameType, ModuleType
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from gateway.tools.chat import slash_commands
from gateway.tools.chat.answer import LiveAnswer, printable
from gateway.tools.chat.conversation import ChatTurn, Session
from gateway.tools.chat.server import ChatError, Unreachable
from gateway.tools.chat.slash_commands import CONTINUED

PROMPT = "> "
MORE = ". "
GREETING = "/help tells the commands, Ctrl-D leaves"
LEAVING = "Ctrl-C again leaves, as does Ctrl-D"
TERMINATED = 128 + signal.SIGTERM


class Terminal:
    """One chat of a user. Answers run in `runner`; its loop is idle at the prompt."""

    def __init__(self, session: Session, console: Console, runner: asyncio.Runner) -> None:
        self._session = session
        self._console = console
        self._runner = runner
        self._keyboard = Keyboard()
        self._warned = False

    def run(self) -> None:
        """Prompt and answer until the user quits."""
        self._print(f"{self._session.model.name} at {self._session.server.url}; {GREETING}")
        running = True
        while running:
            try:
                running = self._execute(self._keyboard.question(PROMPT, MORE))
                self._warned = False
            except EOFError:
                running = False
                self._console.print()
            except KeyboardInterrupt:
                running = self._interrupted()

    def _interrupted(self) -> bool:
        """Ctrl-C at the prompt clears the line; pressed twice on an empty line it ends the chat."""
        self._console.print()
        if self._keyboard.had_text():
            return True
        if not self._warned:
            self._print(LEAVING)
        self._warned = not self._warned
        return self._warned

    def _execute(self, line: str) -> bool:
        """Execute a line; False at the end of the chat."""
        try:
            outcome = slash_commands.read(self._session, line)
            if isinstance(outcome, slash_commands.Ask):
                self._answer(outcome.turn)
            elif isinstance(outcome, slash_commands.Say):
                self._print(outcome.text)
            return not isinstance(outcome, slash_commands.Leave)
        except ChatError as error:
            self._console.print(Text(printable(_with_fix(error)), style="red"))
            return True

    def _answer(self, turn: ChatTurn) -> None:
        with contextlib.suppress(asyncio.CancelledError), self._keyboard.quiet():
            self._runner.run(self._show(turn))

    async def _show(self, turn: ChatTurn) -> None:
        with _cancelled_by_ctrl_c(), LiveAnswer(self._console) as live:
            async with aclosing(self._session.answer(turn)) as parts:
                async for part in parts:
                    live.add(part)

    def _print(self, text: str) -> None:
        if text:
            self._console.print(Text(printable(text), style="dim"))


def choose(console: Console, names: Sequence[str]) -> str:
    """Let the user choose a name; EOFError or KeyboardInterrupt if the user quits."""
    for number, name in enumerate(names, 1):
        console.print(f"{number}  {printable(name)}", markup=False)
    while True:
        answer = input(f"model [1-{len(names)}]: ").strip()
        if answer in names:
            return answer
        if answer.isdecimal() and 0 < int(answer) <= len(names):
            return names[int(answer) - 1]
        console.print(f"expected a number from 1 to {len(names)}, or a name", style="red")


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the terminal before SIGTERM ends the process."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _cancelled_by_ctrl_c() -> Iterator[None]:
    """Make Ctrl-C cancel this task, also if it is pressed again before the task ends."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("only a task can be cancelled")
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


def _with_fix(error: ChatError) -> str:
    if isinstance(error, Unreachable):
        return f"{error}; /retry asks again"
    return str(error)


class Keyboard:
    """Standard input at a terminal; its constructor gives `input` editing and a history."""

    def __init__(self) -> None:
        self._readline = _if_there("readline")
        self._termios = _if_there("termios")

    def question(self, prompt: str, more: str) -> str:
        """One line, or several as one text; EOFError and KeyboardInterrupt as from `input`."""
        lines = [input(prompt)]
        while lines[-1].endswith(CONTINUED):
            lines[-1] = lines[-1].removesuffix(CONTINUED)
            lines.append(input(more))
        return "\n".join(lines)

    def had_text(self) -> bool:
        """Whether the line that Ctrl-C has just cleared had text."""
        return bool(self._readline and self._readline.get_line_buffer())

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Switch the echo off during an answer; typed text waits for the next prompt."""
        if self._termios is None:
            yield
            return
        before = self._termios.tcgetattr(sys.stdin)
        modes = [*before]
        modes[3] &= ~self._termios.ECHO
        self._termios.tcsetattr(sys.stdin, self._termios.TCSADRAIN, modes)
        try:
            yield
        finally:
            self._termios.tcsetattr(sys.stdin, self._termios.TCSADRAIN, before)


def _if_there(module: str) -> ModuleType | None:
    """An optional module of Python's standard library."""

    try:
        return importlib.import_module(module)
    except ImportError:
        return None
