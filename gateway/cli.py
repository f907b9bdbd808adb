"""The command `sluice`: serve, fetch, check; every failure becomes one clear line."""

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from gateway import __version__, flags
from gateway.errors import InferenceError
from gateway.settings import ENVIRONMENT, Settings
from gateway.store import ModelStore, StoreError, default_root

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
CHAT = (
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
    '"stream": true, "parameters": {"max_tokens": 64, "temperature": 0}}'
)


class _Parser(argparse.ArgumentParser):
    """Ends with Triton's status for flags that it does not know."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_FAILED, f"{self.prog}: {message}\n")


class CommandFailed(Exception):
    """A command cannot do what it was asked; the message is all that a user needs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits 1 with a message on stderr when it fails."""
    parsed = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = parsed.command
    try:
        command(parsed)
    except (InferenceError, StoreError, CommandFailed) as error:
        sys.stderr.write(f"sluice: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def build_parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = _Parser(
        prog="sluice", description="LLM-first streaming inference gateway: a drop-in Triton."
    )
    parser.add_argument("--version", action="version", version=f"sluice {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the models of a repository")
    flags.add_flags(serve)
    serve.set_defaults(command=_serve)
    fetch = commands.add_parser("fetch", help="store an embedded model in the user's cache")
    fetch.add_argument("names", nargs="*", metavar="NAME", help="models; none: all of them")
    fetch.set_defaults(command=_fetch)
    check = commands.add_parser("check", help="say what of a repository's configs is honoured")
    check.add_argument("repository", type=Path, metavar="REPOSITORY")
    check.set_defaults(command=_check)
    return parser


def _serve(parsed: argparse.Namespace) -> None:
    log = importlib.import_module("gateway.observability.log")
    log.set_up(logging.DEBUG if parsed.log_verbose else logging.INFO)
    settings = flags.settings(parsed)
    # Spawned engine processes import this module again: what is heavy is imported only here.
    uvloop = importlib.import_module("uvloop")
    uvloop.run(_run_server(settings))


async def _run_server(settings: Settings) -> None:
    server_module = importlib.import_module("gateway.server")
    server = server_module.Server(settings)
    try:
        await server.run(_announce)
    except server_module.StartFailed as error:
        raise CommandFailed(str(error)) from None


def _announce(ports: Mapping[str, int], models: Sequence[Any]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for name, port in ports.items():
        scheme = "" if name == "grpc" else "http://"
        console.print(f"{name:>8}  {scheme}localhost:{port}")
    chats = [
        model.name for model in models if any(i.name == "messages" for i in model.config.input)
    ]
    if chats and "http" in ports:
        url = f"http://localhost:{ports['http']}/v2/models/{chats[0]}/generate_stream"
        console.print(f"\nStream tokens:\n\n  curl -N {url} -d '{CHAT}'\n", markup=False)


def _fetch(parsed: argparse.Namespace) -> None:
    fetch = importlib.import_module("gateway.fetch")
    fetch.fetch_all(parsed.names, ModelStore(default_root(ENVIRONMENT)), Console())


def _check(parsed: argparse.Namespace) -> None:
    check = importlib.import_module("gateway.models.check")
    repository = importlib.import_module("gateway.models.repository")
    findings = check.check(repository.ModelRepository([parsed.repository]))
    Console().print(check.table(findings))
    if any(finding.verdict == "refused" for finding in findings):
        raise CommandFailed("the repository has fields that are refused")
