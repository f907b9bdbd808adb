"""Which model is chatted with: the one that was named, or those that can chat at all."""

import difflib
from collections.abc import Iterable, Sequence

from gateway.tools.chat.server import (
    MESSAGES,
    TEXT_OUTPUT,
    ChatError,
    ChatModel,
    ChatServer,
    Listed,
    Refused,
)


async def named(server: ChatServer, name: str) -> ChatModel:
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
    """Every ready model that can chat; ChatError if there is none, or the server does not say."""
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
    """None for a model that has gone since it was listed."""
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
