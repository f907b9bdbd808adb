"""The flags of `sluice chat`, and what they say."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """With whom to chat, and how. `url` "" is the default of the wire; `once` None asks for a
    terminal, or for what is piped in."""

    model: str = ""
    url: str = ""
    http: bool = False
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    once: str | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="(default: the one that can chat)"
    )
    parser.add_argument(
        "--url",
        default="",
        metavar="HOST:PORT",
        help="where the server is (default: localhost:8001, with --http localhost:8000)",
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
    """What they say."""
    sampling = {"max_tokens": flags.max_tokens, "temperature": flags.temperature}
    return ChatOptions(
        model=flags.model,
        url=flags.url,
        http=flags.http,
        system=flags.system,
        sampling={name: value for name, value in sampling.items() if value is not None},
        once=flags.once,
    )
