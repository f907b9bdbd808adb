"""From the keywords of a server in a program to Settings: the command line's own options."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from gateway.errors import Code, InferenceError
from gateway.flags import serve
from gateway.settings import Settings
from gateway.storage.store import StoreError

SWITCHES = frozenset({"disable_auto_complete_config"})
"""Options that stand for themselves on the command line; here they are true or false."""
WIRES = ("http", "grpc", "metrics")
OF_THE_LOG = "log_"


class _Parser(argparse.ArgumentParser):
    """The command line's parser, for a program: what is wrong is raised."""

    def error(self, message: str) -> NoReturn:
        raise InferenceError(Code.INVALID_ARG, f"options of the server: {message}")


def read_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from keywords named as the options of `sluice serve`, with `_` for `-`.

    A value is what stands behind the `=`: a text, number, path or boolean; a sequence for an option
    that may be given several times; a mapping for one whose values are `NAME=VALUE`, and a mapping
    of mappings for `BACKEND,NAME=VALUE`. None is as if it were not given. A wire listens only if
    its `allow_...` is true or its `..._port` is given. INVALID_ARG says what is wrong.
    """
    if not options.get("model_repository"):
        _refuse("model_repository is missing: expected the folder of models, or several")
    for name in options:
        if name.startswith(OF_THE_LOG):
            _refuse(f"{name}: the program decides what becomes of the log; its logger is 'sluice'")
    parser = _Parser(prog="Server", add_help=False, allow_abbrev=False)
    serve.add_flags(parser)
    try:
        return serve.settings(parser.parse_args(list(_arguments({**_closed(options), **options}))))
    except StoreError as error:
        raise InferenceError(Code.UNAVAILABLE, str(error)) from None


def _closed(options: Mapping[str, Any]) -> dict[str, bool | int]:
    """Nobody listens who was not asked for; and the program's threads need the interpreter."""
    asked = {f"allow_{wire}": options.get(f"{wire}_port") is not None for wire in WIRES}
    return {**asked, "stay_awake_us": 0}


def _arguments(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in SWITCHES:
            yield from [flag] if value else []
        else:
            yield from (f"{flag}={text}" for text in _texts(value))


def _texts(value: Any) -> Iterable[str]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [text for name, each in value.items() for text in _named(name, each)]
    if isinstance(value, list | tuple | set | frozenset):
        return [text for each in value for text in _texts(each)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _named(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        return [f"{name},{text}" for text in _texts(value)]
    return [f"{name}={text}" for text in _texts(value)]


def _refuse(message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"options of the server: {message}")
