"""`sluice chat`: connect, find the model, and chat at the terminal or ask one question."""

import asyncio
import io
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from gateway.tools.chat import once, selection
from gateway.tools.chat.address import connect
from gateway.tools.chat.conversation import Conversation
from gateway.tools.chat.options import ChatOptions
from gateway.tools.chat.sampling import Sampling
from gateway.tools.chat.server import ChatError, ChatModel, ChatServer, ServerGone
from gateway.tools.chat.session import Session
from gateway.tools.chat.terminal import Terminal, choose, restored


def run(options: ChatOptions) -> None:
    """Chat until the user leaves, or until the one question is answered.

    Raises ChatError, and KeyboardInterrupt if the question is interrupted.
    """
    _check_streams()
    with asyncio.Runner() as runner:
        server = runner.run(connect(options.url, http=options.http))
        try:
            _run(options, server, runner)
        except ServerGone as error:
            raise ChatError(f"{error}; {_fix(options)}") from None
        finally:
            runner.run(server.close())


def _run(options: ChatOptions, server: ChatServer, runner: asyncio.Runner) -> None:
    if options.once is not None or not sys.stdin.isatty():
        text = once.question(options.once)
        session = _session(options, server, _only(_candidates(options, server, runner)))
        _ask_once(session, text, runner)
        return
    if not sys.stdout.isatty():
        raise ChatError("standard output is no terminal: ask one question, with --once QUESTION")
    console = Console(highlight=False)
    candidates = _candidates(options, server, runner)
    try:
        model = _chosen(candidates, console)
    except EOFError:
        return
    with restored():
        Terminal(_session(options, server, model), console, runner).run()


def _candidates(
    options: ChatOptions, server: ChatServer, runner: asyncio.Runner
) -> Sequence[ChatModel]:
    if options.model:
        return [runner.run(selection.named(server, options.model))]
    return runner.run(selection.chat_models(server))


def _only(candidates: Sequence[ChatModel]) -> ChatModel:
    if len(candidates) > 1:
        names = ", ".join(model.name for model in candidates)
        raise ChatError(f"several models can chat: {names}; name one, as in `sluice chat MODEL`")
    return candidates[0]


def _chosen(candidates: Sequence[ChatModel], console: Console) -> ChatModel:
    if len(candidates) == 1:
        return candidates[0]
    by_name = {model.name: model for model in candidates}
    return by_name[choose(console, list(by_name))]


def _session(options: ChatOptions, server: ChatServer, model: ChatModel) -> Session:
    return Session(server, model, Conversation(options.system), Sampling(options.sampling))


def _ask_once(session: Session, text: str, runner: asyncio.Runner) -> None:
    try:
        runner.run(once.ask(session, text))
    except BrokenPipeError:
        # Whoever read the answer has had enough; what Python writes at its end must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ChatError("standard output was closed before the answer was whole") from None


def _check_streams() -> None:
    """Refuse to run without them; characters that an encoding lacks become question marks."""
    if sys.stdin is None or sys.stdout is None:
        raise ChatError("standard input or output is closed: /dev/null can take its place")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fix(options: ChatOptions) -> str:
    wire = "HTTP" if options.http else "gRPC"
    return f"start one with `sluice serve --model-repository DIR`, or give its {wire} port by --url"
