"""The command `sluice chat`: connect, choose a model, then chat or ask one question."""

import asyncio
import difflib
import io
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from rich.console import Console

from gateway.policy.keys import API_KEY
from gateway.tools.chat import grpc_server, http_server
from gateway.tools.chat.answer import printable
from gateway.tools.chat.conversation import ChatConversation, Session
from gateway.tools.chat.options import ChatOptions, SamplingParameters
from gateway.tools.chat.server import (
    MESSAGES,
    TEXT_OUTPUT,
    ChatError,
    ChatModel,
    ChatServer,
    Listed,
    Refused,
    Unreachable,
)
from gateway.tools.chat.terminal import Terminal, choose, restored

SENDABLE = re.compile(r"[!-~]*")
"""Names of gRPC and HTTP have no spaces and no other characters."""
WITH_SCHEME = re.compile(r"https?://")
HOST_ONLY = re.compile(r"[^:/\[\]]+|\[[0-9a-fA-F:.]+\]")


def run(options: ChatOptions) -> None:
    """Chat until the user quits, or until the one question is answered.

    Raises ChatError, and KeyboardInterrupt if the question is interrupted.
    """
    _check_streams()
    with asyncio.Runner() as runner:
        server = runner.run(connect(options.url, options.api_key, http=options.http))
        try:
            _run(options, server, runner)
        except Unreachable as error:
            raise ChatError(f"{error}; {_fix(options)}") from None
        finally:
            runner.run(server.close())


def _run(options: ChatOptions, server: ChatServer, runner: asyncio.Runner) -> None:
    if options.once is not None or not sys.stdin.isatty():
        text = read_question(options.once)
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
        return [runner.run(named_model(server, options.model))]
    return runner.run(chat_models(server))


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
    return Session(
        server, model, ChatConversation(options.system), SamplingParameters(options.sampling)
    )


def _ask_once(session: Session, text: str, runner: asyncio.Runner) -> None:
    try:
        runner.run(ask(session, text))
    except BrokenPipeError:
        # The reader has closed the pipe; Python's own flush at exit must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ChatError("standard output was closed before the answer was whole") from None


def _check_streams() -> None:
    """Refuse closed streams; characters that the encoding lacks become question marks."""
    if sys.stdin is None or sys.stdout is None:
        raise ChatError("standard input or output is closed: /dev/null can take its place")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fix(options: ChatOptions) -> str:
    wire = "HTTP" if options.http else "gRPC"
    return f"start one with `sluice serve --model-repository DIR`, or give its {wire} port by --url"


async def connect(url: str, api_key: str = "", *, http: bool) -> ChatServer:
    """The server at a URL, by HTTP or gRPC; sends nothing yet. It gets the key if there is one."""
    if not SENDABLE.fullmatch(url):
        raise ChatError(f"--url is {url!a}, expected HOST:PORT of plain letters, digits and signs")
    if not SENDABLE.fullmatch(api_key):
        raise ChatError(f"{API_KEY} is no API key, expected plain letters, digits and signs")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    if http:
        return http_server.HttpChatServer(http_url(url), headers)
    return grpc_server.GrpcChatServer(grpc_target(url), headers)


def grpc_target(url: str) -> str:
    """HOST:PORT, completed with defaults; ChatError for a URL of HTTP."""
    if WITH_SCHEME.match(url):
        raise ChatError(
            f"--url is '{url}', but gRPC is addressed as HOST:PORT, such as "
            f"localhost:{grpc_server.DEFAULT_PORT}; add --http to chat over HTTP"
        )
    return _with_port(url, grpc_server.DEFAULT_PORT)


def http_url(url: str) -> str:
    """A URL without a path, completed with defaults."""
    scheme = WITH_SCHEME.match(url)
    if scheme:
        return url.rstrip("/")
    return f"http://{_with_port(url.rstrip('/'), http_server.DEFAULT_PORT)}"


def _with_port(place: str, port: int) -> str:
    place = place or "localhost"
    return f"{place}:{port}" if HOST_ONLY.fullmatch(place) else place


async def named_model(server: ChatServer, name: str) -> ChatModel:
    """The model of this name; ChatError if it is unknown, not ready, or cannot chat."""
    listed = await server.models()
    if listed is not None:
        _check_ready(name, listed)
    model = await server.describe(name)
    if not model.chats:
        raise ChatError(
            f"model '{name}' cannot chat: that takes the input '{MESSAGES}' and the output "
            f"'{TEXT_OUTPUT}', and it has the inputs {_names(model.inputs)} and the outputs "
            f"{_names(sorted(model.outputs))}"
        )
    return model


async def chat_models(server: ChatServer) -> Sequence[ChatModel]:
    """Every ready model that can chat; ChatError if there is none, or the server has no index."""
    listed = await server.models()
    if listed is None:
        raise ChatError(f"{server.url} lists no models: name one, as in `sluice chat MODEL`")
    ready = _ready(listed)
    found = [model for name in ready if (model := await _described(server, name)) and model.chats]
    if not found:
        waiting = [each for each in listed if not each.ready]
        raise ChatError(
            f"no model at {server.url} can chat, which takes the input '{MESSAGES}'; ready: "
            f"{_names(ready)}; not ready: {_names(map(_with_state, waiting))}"
        )
    return found


async def _described(server: ChatServer, name: str) -> ChatModel | None:
    """The model; None if it was unloaded after the listing."""
    try:
        return await server.describe(name)
    except Refused:
        return None


def _check_ready(name: str, listed: Sequence[Listed]) -> None:
    versions = [each for each in listed if each.name == name]
    if any(each.ready for each in versions):
        return
    ready = _ready(listed)
    if versions:
        raise ChatError(
            f"model '{name}' is not ready: {_with_state(versions[-1], named=False)}; ready: "
            f"{_names(ready)}"
        )
    near = difflib.get_close_matches(name, {each.name for each in listed}, n=1)
    fix = f"did you mean '{near[0]}'; " if near else ""
    raise ChatError(f"there is no model '{name}'; {fix}ready: {_names(ready)}")


def _ready(listed: Iterable[Listed]) -> Sequence[str]:
    return sorted({each.name for each in listed if each.ready})


def _with_state(row: Listed, *, named: bool = True) -> str:
    state = f"{row.state or 'not loaded'}{f', {row.reason}' if row.reason else ''}"
    return f"{row.name} ({state})" if named else state


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def read_question(given: str | None) -> str:
    """The question: the given text, then the text from a pipe.

    ChatError if both are empty, or the pipe is not UTF-8.
    """
    parts = [given or "", _piped() if _is_piped() else ""]
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text:
        raise ChatError("nothing to ask: give --once QUESTION, or pipe a question in")
    return text


async def ask(session: Session, text: str) -> None:
    """Write the answer to standard output, also the part before an error."""
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
    """Whether standard input is a pipe, file or socket, instead of a terminal or /dev/null."""

    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ChatError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
