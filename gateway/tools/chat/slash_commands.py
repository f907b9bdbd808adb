"""Lines at the prompt of the chat: questions, and commands that begin with `/`."""

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.chat.conversation import ChatTurn, Session
from gateway.tools.chat.options import SamplingParameters
from gateway.tools.chat.server import ChatError

SIGN = "/"
CONTINUED = "\\"
"""A line that ends with it is continued on the next line."""

KEYS = (
    f"A line that ends with {CONTINUED} continues in the next; {2 * SIGN} begins a question with "
    f"{SIGN}.",
    "Ctrl-C stops an answer, what there is of it stays; at the prompt, twice, it leaves, as does "
    "Ctrl-D.",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for the model."""

    turn: ChatTurn


@dataclass(frozen=True, slots=True)
class Say:
    """A text for the user; "" for none."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The end of the chat."""


Outcome = Ask | Say | Leave


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its usage, its purpose and its function."""

    usage: str
    purpose: str
    run: Callable[[Session, str], Outcome]


def read(session: Session, line: str) -> Outcome:
    """Interpret a line; ChatError for a command that is unknown or fails."""

    line = line.strip()
    if not line:
        return Say("")
    if not line.startswith(SIGN):
        return Ask(session.conversation.begin(line))
    if line.startswith(2 * SIGN):
        return Ask(session.conversation.begin(line.removeprefix(SIGN)))
    name, _, argument = line.removeprefix(SIGN).partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise ChatError(_unknown(name))
    return command.run(session, argument.strip())


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    fix = f"did you mean {SIGN}{near[0]}?" if near else f"{SIGN}help lists all of them"
    return f"there is no command {SIGN}{name}: {fix}"


def _system(session: Session, argument: str) -> Outcome:
    conversation = session.conversation
    if not argument:
        return Say(f"system prompt: {conversation.system or 'none'}")
    conversation.system = "" if argument in ('""', "''") else argument
    return Say("system prompt set" if conversation.system else "system prompt removed")


def _set(session: Session, argument: str) -> Outcome:
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    sampling = session.sampling
    if not name:
        return Say(_shown(sampling))
    if value.strip():
        sampling.set(name, value.strip())
        return Say(_shown(sampling))
    if not sampling.unset(name):
        raise ChatError(f"'{name}' is not set: {SIGN}set {name} VALUE sets it")
    return Say(f"{name} is the model's own again")


def _shown(sampling: SamplingParameters) -> str:
    return str(sampling) or "nothing is set: sampling is the model's own"


def _retry(session: Session, argument: str) -> Outcome:
    turn = session.conversation.begin_again()
    if turn is None:
        raise ChatError("nothing was asked yet, so nothing can be asked again")
    return Ask(turn)


def _clear(session: Session, argument: str) -> Outcome:
    session.conversation.clear()
    return Say("the conversation begins anew; system prompt and sampling stay")


def _save(session: Session, argument: str) -> Outcome:
    return Say(f"saved to {session.save(_path(argument))}")


def _path(argument: str) -> Path:
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    if len(words) != 1:
        raise ChatError(f"{SIGN}save needs one file, as in {SIGN}save chat.md")
    return Path(words[0])


def _help(session: Session, argument: str) -> Outcome:
    width = max(len(each.usage) for each in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.purpose}" for each in COMMANDS.values()]
    return Say("\n".join([*lines, *KEYS]))


def _quit(session: Session, argument: str) -> Outcome:
    return Leave()


COMMANDS: Mapping[str, Command] = {
    "system": Command(
        "/system TEXT", 'set the system prompt ("" removes it, no TEXT shows)', _system
    ),
    "set": Command("/set NAME VALUE", "set a sampling parameter (no VALUE: the model's own)", _set),
    "retry": Command("/retry", "ask the latest question again", _retry),
    "clear": Command("/clear", "forget the conversation", _clear),
    "save": Command("/save FILE", "write the conversation to a file, as Markdown", _save),
    "help": Command("/help", "show this", _help),
    "quit": Command("/quit", "leave", _quit),
}
