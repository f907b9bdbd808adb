"""Options of a server inside a program, and parameters of a load: from keywords to settings."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from gateway.errors import Code, InferenceError
from gateway.flags import serve
from gateway.models.model_folder import FILE_PREFIX, VERSIONS, Override, read_versions
from gateway.settings import Settings
from gateway.storage.store import StoreError

SWITCHES = frozenset({"disable_auto_complete_config", "public", "behind_proxy", "on_demand"})
"""Options without a value on the command line; here they are true or false."""
PROTOCOLS = ("http", "grpc", "metrics")
LOG_PREFIX = "log_"

CONFIG = "config"


class _Parser(argparse.ArgumentParser):
    """The parser of the command line, with errors as exceptions."""

    def error(self, message: str) -> NoReturn:
        raise InferenceError(Code.INVALID_ARG, f"options of the server: {message}")


def read_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from keywords named as the options of `sluice serve`, with `_` for `-`.

    A value is a text, number, path or boolean; a sequence for a repeatable option; a mapping for
    `NAME=VALUE`, and a mapping of mappings for `BACKEND,NAME=VALUE`. None means the default. A
    protocol listens only if its `allow_...` is true or its `..._port` is given. Raises INVALID_ARG.
    """
    if not options.get("model_repository"):
        _refuse("model_repository is missing: expected the folder of models, or several")
    for name in options:
        if name.startswith(LOG_PREFIX):
            _refuse(f"{name}: the program decides what becomes of the log; its logger is 'sluice'")
    parser = _Parser(prog="Server", add_help=False, allow_abbrev=False)
    serve.add_flags(parser)
    try:
        return serve.settings(
            parser.parse_args(list(_arguments({**_defaults(options), **options})))
        )
    except StoreError as error:
        raise InferenceError(Code.UNAVAILABLE, str(error)) from None


def _defaults(options: Mapping[str, Any]) -> dict[str, bool | int]:
    """Defaults of a program: no protocol listens, and no thread polls while the program runs."""

    asked = {
        f"allow_{protocol}": options.get(f"{protocol}_port") is not None for protocol in PROTOCOLS
    }
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


def read_override(parameters: Mapping[str, Any] | None) -> Override | None:
    """Read load parameters: `config` as JSON text or a mapping, files as bytes, `versions` as text.

    Raises INVALID_ARG for others.
    """

    if not parameters:
        return None
    if not isinstance(parameters, Mapping):
        raise InferenceError(
            Code.INVALID_ARG,
            f"load parameters are {type(parameters).__name__}, expected a mapping from names to "
            "values",
        )
    config, files, versions = None, {}, frozenset[int]()
    for name, value in parameters.items():
        if name == CONFIG and isinstance(value, str | Mapping):
            config = value if isinstance(value, str) else _json(value)
        elif str(name).startswith(FILE_PREFIX) and isinstance(value, bytes):
            files[name] = value
        elif name == VERSIONS and isinstance(value, str):
            versions = read_versions(value)
        else:
            raise InferenceError(
                Code.INVALID_ARG,
                f"load parameter '{name}' is {type(value).__name__}, expected '{CONFIG}' with JSON "
                f"text or a mapping, '{VERSIONS}' with text, or '{FILE_PREFIX}<path>' with bytes",
            )
    return Override(config, files, versions)


def _json(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(config)
    except (TypeError, ValueError) as error:
        raise InferenceError(
            Code.INVALID_ARG, f"load parameter '{CONFIG}' cannot be written as JSON: {error}"
        ) from None
