"""The chat at a terminal: a prompt, answers that appear as they come, and what Ctrl-C means."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from gateway.tools.chat import slash_commands
from gateway.tools.chat.answer import LiveAnswer
from gateway.tools.chat.conversation import Turn
from gateway.tools.chat.keyboard import Keyboard
from gateway.tools.chat.markdown import printable
from gateway.tools.chat.server import ChatError, ServerGone
from gateway.tools.chat.session import Session

PROMPT = "> "
MORE = ". "
GREETING = "/help tells the commands, Ctrl-D leaves"
LEAVING = "Ctrl-C again leaves, as does Ctrl-D"
TERMINATED = 128 + signal.SIGTERM


class Terminal:
    """One chat between a user and a session. Answers run in `runner`; its loop rests meanwhile."""

    def __init__(self, session: Session, console: Console, runner: asyncio.Runner) -> None:
        self._session = session
        self._console = console
        self._runner = runner
        self._keyboard = Keyboard()
        self._warned = False

    def run(self) -> None:
        """Prompt and answer until the user leaves."""
        self._tell(f"{self._session.model.name} at {self._session.server.url}; {GREETING}")
        going_on = True
        while going_on:
            try:
                going_on = self._obey(self._keyboard.question(PROMPT, MORE))
                self._warned = False
            except EOFError:
                going_on = False
                self._console.print()
            except KeyboardInterrupt:
                going_on = self._interrupted()

    def _interrupted(self) -> bool:
        """Ctrl-C at the prompt: it clears the line; on an empty one, twice, it ends the chat."""
        self._console.print()
        if self._keyboard.had_text():
            return True
        if not self._warned:
            self._tell(LEAVING)
        self._warned = not self._warned
        return self._warned

    def _obey(self, line: str) -> bool:
        """Do what a line says; False if the chat is over."""
        try:
            outcome = slash_commands.read(self._session, line)
            if isinstance(outcome, slash_commands.Ask):
                self._answer(outcome.turn)
            elif isinstance(outcome, slash_commands.Say):
                self._tell(outcome.text)
            return not isinstance(outcome, slash_commands.Leave)
        except ChatError as error:
            self._console.print(Text(printable(_with_fix(error)), style="red"))
            return True

    def _answer(self, turn: Turn) -> None:
        with contextlib.suppress(asyncio.CancelledError), self._keyboard.quiet():
            self._runner.run(self._show(turn))

    async def _show(self, turn: Turn) -> None:
        with _cancelled_by_ctrl_c(), LiveAnswer(self._console) as live:
            async with aclosing(self._session.answer(turn)) as parts:
                async for part in parts:
                    live.add(part)

    def _tell(self, text: str) -> None:
        if text:
            self._console.print(Text(printable(text), style="dim"))


def choose(console: Console, names: Sequence[str]) -> str:
    """Let the user pick one; EOFError and KeyboardInterrupt if nothing is picked."""
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
    """Let a termination put the terminal right before the process ends."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _cancelled_by_ctrl_c() -> Iterator[None]:
    """Make Ctrl-C cancel this task, also when it is pressed again before the task has ended."""
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
    if isinstance(error, ServerGone):
        return f"{error}; /retry asks again"
    return str(error)
