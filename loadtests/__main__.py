"""The command of each load test: `python -m loadtests NAME`, or `--help`.

A load test is imported when it runs, because packages may be missing.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[argparse.ArgumentParser, Sequence[str]], None]
"""A load test; it adds its flags to the parser, and parses the arguments."""


@dataclass(frozen=True, slots=True)
class Command:
    """A load test by its module; the function has the name of the command."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "all": Command("figures.command", "the load tests of the page of figures, and the page"),
    "compare": Command("llm", "an LLM in the gateway and in vLLM's own server"),
    "beside": Command("llm", "an LLM with small inferences at the same time"),
    "small_llm": Command("llm", "processor time per token around an engine with a tiny model"),
    "embeddings": Command("encoders", "/v1/embeddings of the gateway and of vLLM's own server"),
    "encoders": Command("encoders", "sentences by the gateway, Triton, and ONNX Runtime alone"),
    "tensors": Command("tensors", "small tensors by the gateway and by Triton"),
    "python": Command("tensors", "the same model.py in the gateway and in Triton"),
    "transports": Command("tensors", "gRPC by both transports of the gateway, and by Triton"),
    "policy": Command("tensors", "small tensors with and without API keys"),
    "runtimes": Command("runtimes", "the same weights on several runtimes of the gateway"),
    "start": Command("start", "start of a gateway without engines"),
    "first_minute": Command("first_minute", "from git clone to the first token of make serve"),
    "streams": Command("streams", "responses per second without an engine"),
    "frontends": Command("streams", "processor time of many streams at a steady rate"),
    "idle_streams": Command("idle_streams", "memory of waiting streams"),
    "grpc_soak": Command("grpc_soak", "memory in an hour of mixed gRPC load"),
    "fleet": Command("fleet", "a router with a replica, and the same models in one server"),
    "routing": Command("routing.command", "rules for the choice of a replica, simulated"),
    "guardrails": Command("guardrails", "guardrails of rollouts, simulated: false and true alarms"),
    "change": Command("change", "downloads, polls, rollouts and models asleep, with their bounds"),
    "fair": Command(
        "fair", "tenants: cost, floods, deadlines, receipts, traces, with their bounds"
    ),
    "demo_rollout": Command("demo_rollout", "a rollout to watch, on moto: one that errs, one not"),
    "soak": Command("soak.soak", "random clients, reloads and kills"),
    "profile": Command("profile", "a flame graph of one hot path"),
    "gpu_check": Command("gpu_check.parts", "the parts that need a GPU, and their cost"),
}


def main() -> None:
    """Run the named load test."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:14}{each.summary}" for name, each in COMMANDS.items()),
    )
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help="the load test:")
    name, arguments = parser.parse_args(sys.argv[1:2]).name, sys.argv[2:]
    command = COMMANDS[name]
    run: Run = getattr(importlib.import_module(f"loadtests.{command.module}"), name)
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    run(argparse.ArgumentParser(f"{parser.prog} {name}", description=summary), arguments)


if __name__ == "__main__":
    main()
