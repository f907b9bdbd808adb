"""One question without a terminal: the answer goes to standard output as it comes, and plainly."""

import os
import stat
import sys
from contextlib import aclosing

from gateway.tools.chat.markdown import printable
from gateway.tools.chat.server import ChatError
from gateway.tools.chat.session import Session


def question(given: str | None) -> str:
    """What is asked: the text that was given, and behind it what is piped in.

    ChatError if that is nothing, or no text.
    """
    parts = [given or "", _piped() if _is_piped() else ""]
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text:
        raise ChatError("nothing to ask: give --once QUESTION, or pipe a question in")
    return text


async def ask(session: Session, text: str) -> None:
    """Write the answer to standard output; what has come before an error is written, too."""
    show = printable if sys.stdout.isatty() else str
    turn = session.conversation.begin(text)
    try:
        async with aclosing(session.answer(turn)) as parts:
            async for part in parts:
                sys.stdout.write(show(part.text))
                sys.stdout.flush()
    finally:
        if turn.answer and not turn.answer.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _is_piped() -> bool:
    """Whether somebody has sent something in: a terminal or /dev/null would have nothing."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ChatError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
