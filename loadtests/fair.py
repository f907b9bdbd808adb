"""Fairness with its bounds: cost per request and token, floods, deadlines, receipts, traces."""

import argparse
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests import fair_floods, fair_tensors
from loadtests.llm import ARGUMENTS, write_tiny_model
from loadtests.support import generation, rounds, triton
from loadtests.support.arrivals import StampedConnection
from loadtests.support.collector import collecting
from loadtests.support.findings import Finding, Part, report_of
from loadtests.support.generation import Load
from loadtests.support.http_client import ADD_SUB_BODY, ADD_SUB_PATH, Address, with_headers
from loadtests.support.results import Line, Metric, Results
from loadtests.support.rounds import Plan, Report, Step
from loadtests.support.servers import Contender, LoadTestFailed, Server, gateway, spending
from loadtests.support.triton import Traffic
from loadtests.tenants import Keys, write_tenants
from loadtests.tensors import add_parts_flag
from loadtests.wrong_keys import wrong_keys

HERE = Path(__file__).parent
SMALL, LLM = "add_sub", "llm"
OFF, ON = "off", "keys, quotas, fair queue"
UNSHOWN = "keys, quotas without headers, fair queue"
"""As ON, of a tenant whose limits no answer names: clients need time for six more headers."""
WIRES = ("http", "grpc")
LIMITS = {
    "requests_per_minute": 1e9,
    "tokens_per_minute": 1e12,
    "compute_ms_per_minute": 1e12,
    "max_in_flight": 1000,
}
"""Limits that are counted and never reached."""
TENANTS = {
    "team": LIMITS,
    "unshown": {
        name: LIMITS[name] for name in LIMITS if name in ("compute_ms_per_minute", "max_in_flight")
    },
}
LEAST_RATE, LEAST_TOKENS, LEAST_TRACED, LEAST_SAMPLED = 0.97, 0.99, 0.9, 0.99
TOKENS = Load(streams=16, requests=4, max_tokens=64)
MEASURED = 8
"""Loads of a server in a round: one takes a second, in which the machine may be slower."""
PROMPT_WORDS = 16
TOTAL = re.compile(r"total;dur=([0-9.]+)")
WITHIN_MS, WITHIN_SHARE, LEAST_WITHIN = 1.0, 0.01, 0.99
Timed = tuple[float, float]
"""The milliseconds of a request by the clock of its client, and by its receipt."""
TRACED, SAMPLED, DEAD = "rate 1", "rate 1000", "rate 1, no collector"


def fair(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure what fairness, receipts and traces cost and give, and compare with the bounds."""
    add_parts_flag(parser, tuple(PARTS))
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    for flag, default, text in (
        ("--secs", 30, "length of each flood"),
        ("--max-tokens", 32, "tokens of each answer in a flood"),
        ("--requests", 1000, "requests of `receipts`"),
    ):
        parser.add_argument(
            flag, type=rounds.positive, default=default, metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument(
        "--to", type=Path, metavar="FILE.svg", help="the waits of `overload` as curves"
    )
    triton.add_flags(parser)
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _fair)


def _fair(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    return report_of("Fair among tenants", PARTS, asked, folder, console)


def tensors(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Small tensors with keys, quotas and the fair queue, against a server without keys.

    All clients send a key. Over HTTP the figure without the headers of limits is shown, too.
    """
    keys = write_tenants(folder / "keys.toml", TENANTS)
    contenders = [
        *_off_and_on(HERE / "models", keys),
        gateway(HERE / "models", UNSHOWN, f"--api-keys={keys.file}"),
    ]
    lines = [
        Line(f"{SMALL} over {wire}", "infer", clients)
        for wire in WIRES
        for clients in asked.clients
    ]
    shown, unshown = (
        [(str(line), partial(_perf, asked, line, keys.of[tenant])) for line in lines]
        for tenant in TENANTS
    )
    steps: Mapping[str, Sequence[Step]] = {OFF: shown, ON: shown, UNSHOWN: unshown}
    results.merge(rounds.run(Plan(contenders, steps, asked.rounds, asked.server_cpus), console))
    found = [
        Finding(
            figure=f"infer/s, {line}",
            value=results.ratio(line.rate, ON, OFF) or 0.0,
            least=LEAST_RATE,
        )
        for line in lines
    ]
    without = [
        Finding(
            figure=f"infer/s, {line}, quotas without headers",
            value=results.ratio(line.rate, UNSHOWN, OFF) or 0.0,
        )
        for line in lines
        if "http" in line.name
    ]
    return [*found, *without]


def tokens(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Tokens of a small LLM with keys, quotas and the fair queue, against a server without."""
    keys = write_tenants(folder / "keys.toml", {"team": LIMITS})
    write_tiny_model(folder / "repository" / LLM, ARGUMENTS)
    contenders = _off_and_on(folder / "repository", keys)
    line = Line(f"small {LLM}", "token", TOKENS.streams, "stream")
    steps: Sequence[Step] = [
        ("warm-up", partial(_unmeasured, partial(_tokens, line, keys))),
        *[("tokens", partial(_tokens, line, keys))] * MEASURED,
    ]
    _measure(asked, contenders, steps, console, results)
    ratio = results.ratio(line.rate, ON, OFF) or 0.0
    return [Finding(figure=f"token/s, {ON} over {OFF}", value=ratio, least=LEAST_TOKENS)]


def receipts(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """The sum of a receipt's parts against the client's own clock, on this machine.

    Once up to the time at which the client has read the answer, which has the client's own waits
    for a processor and its parsing, and once up to the arrival of the last byte at its socket.
    """
    repository = folder / "repository"
    write_tiny_model(repository / LLM, ARGUMENTS)
    shutil.copytree(HERE / "models" / SMALL, repository / SMALL)
    read: list[Timed] = []
    arrived: list[Timed] = []
    steps: Sequence[Step] = [("receipts", partial(_receipts, asked.requests, read, arrived))]
    _measure(asked, [gateway(repository, ON)], steps, console, results)
    return [
        Finding(
            figure=f"receipts within 1 % or 1 ms of the client's clock {until}, of {len(found)}",
            value=sum(_is_near(*each) for each in found) / len(found),
            least=LEAST_WITHIN,
        )
        for until, found in (("at the end of its read", read), ("at the arrival", arrived))
    ]


def _is_near(own_ms: float, told_ms: float) -> bool:
    return abs(own_ms - told_ms) <= max(WITHIN_MS, WITHIN_SHARE * own_ms)


def traces(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Small tensors of 8 clients with traces of OpenTelemetry, against a server without."""
    line = Line(f"{SMALL} over http, traced", "infer", 8)
    steps: Sequence[Step] = [(str(line), partial(_perf, asked, line, ""))]
    with collecting() as collected:
        contenders = [
            gateway(HERE / "models", OFF),
            _tracing(TRACED, collected.url, 1),
            _tracing(SAMPLED, collected.url, 1000),
            _tracing(DEAD, "http://127.0.0.1:9/v1/traces", 1),
        ]
        _measure(asked, contenders, steps, console, results)
        if not collected.requests:
            raise LoadTestFailed("the collector got no spans")
    bounds = {TRACED: LEAST_TRACED, SAMPLED: LEAST_SAMPLED, DEAD: LEAST_TRACED}
    return [
        Finding(
            figure=f"infer/s, {name} over {OFF}",
            value=results.ratio(line.rate, name, OFF) or 0.0,
            least=least,
        )
        for name, least in bounds.items()
    ]


PARTS: dict[str, Part] = {
    "tensors": tensors,
    "tokens": tokens,
    "receipts": receipts,
    "traces": traces,
    "quiet": fair_floods.quiet,
    "weights": fair_floods.weights,
    "overload": fair_floods.overload,
    "overload_tensors": fair_tensors.overload_tensors,
    "wrong_keys": wrong_keys,
}


def _off_and_on(repository: Path, keys: Keys) -> Sequence[Contender]:
    return [gateway(repository, OFF), gateway(repository, ON, f"--api-keys={keys.file}")]


def _measure(
    asked: argparse.Namespace,
    contenders: Sequence[Contender],
    steps: Sequence[Step],
    console: Console,
    results: Results,
) -> None:
    by_name = {each.name: steps for each in contenders}
    results.merge(rounds.run(Plan(contenders, by_name, asked.rounds, asked.server_cpus), console))


def _perf(
    asked: argparse.Namespace, line: Line, key: str, server: Server
) -> Mapping[Metric, float]:
    wire = line.name.split()[2].rstrip(",")
    traffic = Traffic(model=SMALL, wire=wire, clients=line.count, key=key)
    return triton.measure_costs(asked, traffic, line, server)


def _unmeasured(
    measure: Callable[[Server], Mapping[Metric, float]], server: Server
) -> Mapping[Metric, float]:
    measure(server)
    return {}


def _tokens(line: Line, keys: Keys, server: Server) -> Mapping[Metric, float]:
    endpoint = generation.generate(LLM)

    def encode(address: Address, prompt: str, count: int) -> bytes:
        return with_headers(endpoint.encode(address, prompt, count), keys.headers("team"))

    words = generation.prompts(PROMPT_WORDS, generation.WARM_UP_SEED)
    with spending(server.pid) as spent:
        outcome = generation.put(TOKENS, Address(server.ports.http), encode, words)
    return line.costs(TOKENS.tokens / outcome.secs, spent.secs / TOKENS.tokens * 1e6)


GENERATE_PATH = f"/v2/models/{LLM}/generate"
GENERATE_BODY = b'{"text_input": "Words: time year", "parameters": {"max_tokens": %d}}'
WISH = {"x-want-timing": "1", "content-type": "application/json"}


def _receipts(
    count: int, read: list[Timed], arrived: list[Timed], server: Server
) -> Mapping[Metric, float]:
    """Note the milliseconds of the client, up to both ends, and of the receipt of each request."""
    connection = StampedConnection("127.0.0.1", server.ports.http, timeout=60)
    for number in range(count):
        path, body = ADD_SUB_PATH, ADD_SUB_BODY
        if number % 2:
            path, body = GENERATE_PATH, GENERATE_BODY % (number % 16 + 1)
        began_ns = time.perf_counter_ns()
        connection.request("POST", path, body, WISH)
        answer = connection.getresponse()
        text = answer.read()
        ended_ns = time.perf_counter_ns()
        told = TOTAL.search(answer.headers.get("server-timing", ""))
        if answer.status != 200 or told is None:
            raise LoadTestFailed(f"{path} has no receipt: {answer.status} {text.decode()}")
        read.append(((ended_ns - began_ns) / 1e6, float(told[1])))
        arrived.append(((connection.arrived_ns - began_ns) / 1e6, float(told[1])))
    return {}


def _tracing(name: str, url: str, rate: int) -> Contender:
    settings = ("mode=opentelemetry", f"opentelemetry,url={url}", f"rate={rate}")
    flags = [f"--trace-config={each}" for each in (*settings, "level=TIMESTAMPS")]
    return gateway(HERE / "models", name, *flags)
