"""The servers that are compared: how is each of them started?"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.server import Launch, Ports, free_ports

GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Contender:
    """One server of a comparison; each start has ports of its own."""

    name: str
    launch: Callable[[], Launch]


def gateway(repository: Path, name: str = GATEWAY, *flags: str) -> Contender:
    """The gateway, serving a repository."""

    def launch() -> Launch:
        ports = free_ports()
        command = [
            *(sys.executable, "-m", "gateway", "serve"),
            *("--model-repository", str(repository)),
            *("--http-port", str(ports.http)),
            *("--grpc-port", str(ports.grpc)),
            *("--metrics-port", str(ports.metrics)),
            *flags,
        ]
        return Launch(name=name, command=command, ports=ports)

    return Contender(name, launch)


def triton(command: str, repository: Path) -> Contender:
    """A Triton, started by a command that takes a repository and three ports."""

    def launch() -> Launch:
        ports = free_ports()
        ours = [str(repository), str(ports.http), str(ports.grpc), str(ports.metrics)]
        return Launch(name="triton", command=[*shlex.split(command), *ours], ports=ports)

    return Contender("triton", launch)


def add_triton_flag(parser: argparse.ArgumentParser) -> None:
    """The flag `--triton`."""
    parser.add_argument(
        "--triton",
        metavar="COMMAND",
        help="compare with the Triton that `COMMAND REPOSITORY HTTP GRPC METRICS` starts",
    )


def vllm(model: str, engine_flags: Sequence[str]) -> Contender:
    """vLLM's own OpenAI server with one model."""

    def launch() -> Launch:
        port = free_ports().http
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", model),
            # The gateway writes no line per request either.
            "--disable-uvicorn-access-log",
            *engine_flags,
        ]
        return Launch(
            name="vllm", command=command, ports=Ports(port, port, port), ready_path="/health"
        )

    return Contender("vllm", launch)
