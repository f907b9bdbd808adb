"""Streams of one LLM: prompts, endpoints, load, figures, and flags of vLLM's own server."""

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import uvloop

from backends.vllm.settings import OpenAiSettings, read_openai_settings
from gateway.config.pbtxt import parse
from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.support.http_client import Address, EventTimer, Timing, connect, post
from loadtests.support.results import Line, Metric
from loadtests.support.servers import (
    CLIENTS,
    FRONTENDS,
    SERVER,
    LoadTestFailed,
    Server,
    ServerFailed,
    Spent,
    read_metrics,
    spending,
    total,
)

WORDS = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government
    number night point home water room mother area money story fact month lot right study book eye
    job word business issue side kind head house service friend father power hour game line end
    member law car city community name president team minute idea body information back parent face
    others level office endpoint health person art war history party result change morning reason
    research girl guy moment air teacher force education
""".split()  # noqa: SIM905 - a list would take a line for each
"""Words that are one token each, with the space before them, in common vocabularies."""


def prompts(words: int, seed: int) -> Iterator[str]:
    """Endless prompts of that many words each; the same for the same seed."""
    choose = random.Random(seed)
    while True:
        yield "Words: " + " ".join(choose.choices(WORDS, k=words))


SETTLE_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of prompts and of completions."""

    prompt: int
    completion: int

    def __sub__(self, earlier: "Tokens") -> "Tokens":
        return Tokens(self.prompt - earlier.prompt, self.completion - earlier.completion)


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """The port of a server's metrics, and the names of the two counters."""

    port: int
    prompt: str
    completion: str

    def read(self) -> Tokens:
        """The counters now."""
        lines = read_metrics(self.port)
        return Tokens(int(total(lines, self.prompt)), int(total(lines, self.completion)))

    def read_after(self, before: Tokens, expected: int) -> Tokens:
        """The tokens counted since `before`, as soon as `expected` completion tokens are.

        A server may count a request after its client has the last token.
        """
        deadline = time.monotonic() + SETTLE_SECS
        while (found := self.read() - before).completion < expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found


Question = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""The body of a request, from a prompt and its sampling parameters."""

ASK_SECS = 120
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


TEXT, CHAT = "text", "chat"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of a server; its kind is that of the load."""

    kind: str
    path: str
    question: Question
    prompt_counter: str
    completion_counter: str

    def encode(self, address: Address, prompt: str, max_tokens: int) -> bytes:
        """The bytes of a request for exactly that many tokens, at temperature 0."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return post(self.path, address, orjson.dumps(self.question(prompt, sampling)))

    def counters(self, server: Server) -> TokenCounters:
        """The counters of a server behind this endpoint."""
        return TokenCounters(server.ports.metrics, self.prompt_counter, self.completion_counter)


GATEWAY_COUNTERS = ("gateway_prompt_tokens_total", "gateway_completion_tokens_total")
VLLM_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def generate(model: str) -> Endpoint:
    """The gateway's generate extension."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"text_input": prompt, "stream": True, "parameters": sampling}

    path = f"/v2/models/{model}/generate_stream"
    return Endpoint(TEXT, path, question, *GATEWAY_COUNTERS)


def completions(model: str) -> Endpoint:
    """OpenAI's completions of vLLM."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": model, "prompt": prompt, "stream": True, **sampling}

    return Endpoint(TEXT, "/v1/completions", question, *VLLM_COUNTERS)


def chat(model: str, counters: tuple[str, str]) -> Endpoint:
    """OpenAI's chat, of a server with these counters."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "stream": True, **sampling}

    return Endpoint(CHAT, "/v1/chat/completions", question, *counters)


TIMEOUT_SECS = 600.0

Encode = Callable[[Address, str, int], bytes]
"""The bytes of a request to a server, from a prompt and a number of tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` concurrent streams, each with `requests` requests for `max_tokens` tokens."""

    streams: int
    requests: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """The tokens of all answers."""
        return self.streams * self.requests * self.max_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The timings of all requests, and how much of a core the client used."""

    timings: Sequence[Timing]
    client_cores: float

    @property
    def secs(self) -> float:
        """Seconds from the first request to the last event."""
        began = min(timing.sent for timing in self.timings)
        return max(timing.arrivals[-1] for timing in self.timings) - began


def put(load: Load, address: Address, encode: Encode, prompts: Iterator[str]) -> Outcome:
    """Put a load on a server, and wait for all answers."""
    cpu_began, began = time.process_time(), time.perf_counter()
    timings = uvloop.run(_put(load, address, encode, prompts))
    used = time.process_time() - cpu_began
    return Outcome(timings, used / (time.perf_counter() - began))


async def _put(
    load: Load, address: Address, encode: Encode, prompts: Iterator[str]
) -> Sequence[Timing]:
    streams = [
        [encode(address, next(prompts), load.max_tokens) for _ in range(load.requests)]
        for _ in range(load.streams)
    ]
    async with asyncio.timeout(TIMEOUT_SECS):
        answered = await asyncio.gather(*(_ask(address, requests) for requests in streams))
    return [timing for timings in answered for timing in timings]


async def _ask(address: Address, requests: Sequence[bytes]) -> Sequence[Timing]:
    return [await ask_once(address, request) for request in requests]


async def ask_once(address: Address, request: bytes) -> Timing:
    """One request on a connection of its own; StreamFailed unless it ends well."""
    transport, timer = await connect(address, lambda: EventTimer(request))
    try:
        return await timer.done
    finally:
        transport.close()


PROMPT_WORDS = 32
WARM_UP_SEED = 0
PROMPT_TOKENS, TTFT = "prompt tokens", "TTFT p50"


def warm_up(endpoint: Endpoint, load: Load, server: Server) -> Mapping[Metric, float]:
    """Put a load on a server without measuring it."""
    _run_load(endpoint, load, WARM_UP_SEED, server)
    return {}


def measure(endpoint: Endpoint, load: Load, seed: int, server: Server) -> Mapping[Metric, float]:
    """The figures of a load on a server; LoadTestFailed if the server counted other tokens."""
    counters = endpoint.counters(server)
    before = counters.read()
    with spending(server.pid) as spent:
        outcome = _run_load(endpoint, load, seed, server)
    counted = counters.read_after(before, load.tokens)
    if counted.completion != load.tokens:
        raise LoadTestFailed(
            f"{server.name} counted {counted.completion} tokens, expected {load.tokens}"
        )
    line = line_of(endpoint.kind, load)
    return {
        **figures(outcome, load, endpoint.kind),
        **costs(line, load, spent),
        line.other(PROMPT_TOKENS): counted.prompt,
    }


def _run_load(endpoint: Endpoint, load: Load, seed: int, server: Server) -> Outcome:
    # Every load has prompts of its own, and both servers get the same.
    return put(load, Address(server.ports.http), endpoint.encode, prompts(PROMPT_WORDS, seed))


WITHOUT_ENGINE = "processor time without the engine"


def line_of(kind: str, load: Load) -> Line:
    """The line of a load of that kind."""
    return Line(kind, "token", load.streams, "stream")


def costs(line: Line, load: Load, spent: Spent) -> Mapping[Metric, float]:
    """The processor time of a token: of all processes, and of those that are not the engine's."""
    token_us = 1e6 / load.tokens
    around = line.lower(WITHOUT_ENGINE, line.processor_time.unit)
    return {
        line.processor_time: spent.secs * token_us,
        around: spent.secs_of(SERVER, FRONTENDS, CLIENTS) * token_us,
    }


def figures(outcome: Outcome, load: Load, kind: str) -> Mapping[Metric, float]:
    """The figures of a load, from the times of its events."""
    timings, line = outcome.timings, line_of(kind, load)
    gaps = list(chain.from_iterable(timing.gaps for timing in timings))
    firsts = [timing.first for timing in timings]
    events = sum(len(timing.arrivals) for timing in timings)
    return {
        line.rate: load.tokens / outcome.secs,
        line.lower(TTFT, "ms"): statistics.median(firsts) * 1e3,
        line.lower("inter-token p99", "ms"): _p99(gaps) * 1e3,
        line.other("tokens per event"): load.tokens / events,
        line.other("CPU of the client", "cores"): outcome.client_cores,
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model of a repository: its name there, and the flags that make vLLM serve the same."""

    name: str
    flags: Sequence[str]


def read_model(folder: Path, defaults: Mapping[str, Any] = NO_DEFAULTS) -> EngineModel:
    """Read `1/model.json` and the config of a model folder.

    `defaults` are the gateway's own for arguments that are not in the file. The weights are those
    that the gateway finds. ServerFailed if there is none.
    """
    version = folder / "1"
    try:
        arguments: dict[str, Any] = orjson.loads((version / "model.json").read_bytes())
        arguments = {**defaults, **arguments}
        config = parse((folder / "config.pbtxt").read_text(), folder.name)
    except FileNotFoundError as error:
        raise ServerFailed(f"no model of backend vllm: '{error.filename}' is missing") from None
    source = arguments["model"]
    for place in (version, default_root(ENVIRONMENT)):
        if (place / source / "config.json").is_file():
            arguments["model"] = str((place / source).resolve())
    settings = read_openai_settings(config, version)
    return EngineModel(folder.name, (*engine_flags(arguments), *openai_flags(settings)))


def gateway_defaults() -> Mapping[str, Any]:
    """The gateway's own arguments for an engine on this machine, found in a process that ends."""
    program = (
        "import json; from backends.vllm.machine import engine_defaults; "
        "print(json.dumps(engine_defaults()))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=ASK_SECS)
    found: dict[str, Any] = orjson.loads(ended.stdout.splitlines()[-1])
    return found


def openai_flags(settings: OpenAiSettings) -> Sequence[str]:
    """The flags of a chat template and of parsers, which decide the chunks of a stream."""
    flags = {
        "chat_template": settings.chat_template,
        "tool_call_parser": settings.tool_call_parser or None,
        "enable_auto_tool_choice": True if settings.tool_call_parser else None,
        "reasoning_parser": settings.reasoning_parser or None,
    }
    return engine_flags(flags)


def engine_flags(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Engine arguments as flags; structures become JSON."""
    return [part for name, value in arguments.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> Sequence[str]:
    dashed = name.replace("_", "-")
    if value is None:
        return ()
    if isinstance(value, bool):
        return (f"--{dashed}" if value else f"--no-{dashed}",)
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        return (f"--{dashed}", *map(str, value))
    text = orjson.dumps(value).decode() if isinstance(value, list | dict) else str(value)
    return (f"--{dashed}", text)
