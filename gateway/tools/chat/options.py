"""Options of `sluice chat`, and the sampling parameters of a chat."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.policy.keys import API_KEY
from gateway.tools.chat.server import ChatError

ONE_ANSWER = ("n", "best_of")
"""Parameters for several answers; the chat shows and keeps one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The values of the options.

    `url` "" is the default of the protocol. `once` is the only question; None means a terminal, or
    a question from a pipe. `api_key` is "" without one.
    """

    model: str = ""
    url: str = ""
    http: bool = False
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    once: str | None = None
    api_key: str = field(default="", repr=False)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="(default: the one that can chat)"
    )
    parser.add_argument(
        "--url",
        default="",
        metavar="HOST:PORT",
        help="where the server is (default: localhost:8001, with --http localhost:8000); "
        f"{API_KEY} in the environment is its API key",
    )
    parser.add_argument("--http", action="store_true", help="use HTTP instead of gRPC")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: no limit)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest answer")
    parser.add_argument(
        "--once",
        metavar="QUESTION",
        help="print the answer and end; what is piped in stands behind the question, or is it",
    )


def options(flags: argparse.Namespace) -> ChatOptions:
    """The values of the parsed options."""
    sampling = {"max_tokens": flags.max_tokens, "temperature": flags.temperature}
    return ChatOptions(
        model=flags.model,
        url=flags.url,
        http=flags.http,
        system=flags.system,
        sampling={name: value for name, value in sampling.items() if value is not None},
        once=flags.once,
        api_key=os.environ.get(API_KEY, ""),
    )


class SamplingParameters:
    """Sampling parameters that the user has set; the server validates them at the next question."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._values = dict(given)

    @property
    def values(self) -> Mapping[str, Any]:
        """All parameters by name."""
        return self._values

    def set(self, name: str, text: str) -> None:
        """Set one from JSON, or else from text; ChatError for several answers."""
        value = _read(text)
        if name in ONE_ANSWER and value != 1:
            raise ChatError(f"'{name}' is {text}, but a chat shows one answer at a time")
        self._values[name] = value

    def unset(self, name: str) -> bool:
        """Restore the model's own value; False if the parameter was not set."""

        known = name in self._values
        self._values.pop(name, None)
        return known

    def __str__(self) -> str:
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in self._values.items())


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
