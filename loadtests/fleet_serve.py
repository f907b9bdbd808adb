"""Ray Serve, and a router with a replica: the same echo, and the same items in streams.

Each is measured over HTTP, and between two of its processes: a handle of Ray Serve, and the
connection of a router to a replica.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import uvloop

from gateway.messages import InferRequest
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from loadtests.fleet_tensors import Responses, connected
from loadtests.support.http_client import Address, EventCounter, connect, latencies_us, post
from loadtests.support.results import Line, Metric, Results
from loadtests.support.servers import (
    Cpus,
    Launch,
    LoadTestFailed,
    Server,
    free_ports,
    gateway,
    serving,
)

SERVE, GATEWAY = "Ray Serve", "gateway"
RAY_SERVE = "ray[serve]==2.60.0"
ENVIRONMENT = Path(sys.prefix) / "serve"
APP = Path(__file__).with_name("serve_app.py")
ECHO_BYTES, ITEM = 64, "twelve bytes"
STREAMS = (1, 32)
REQUESTS, ITEMS = 500, 8000
"""Requests, and items of all streams together, of one measurement."""
FASTER = 10
"""The gateway has that many times as many items, so that it takes a measurable time, too."""
ECHO = """
backend: "identity"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
REPEAT = 'backend: "repeat"\n'
LATENCY, PER_SEC = "latency_us", "per_sec"
Figures = Mapping[str, float]


def make_environment() -> str:
    """Make the environment of Ray Serve if it is missing; the reason why it cannot be made."""
    python = ENVIRONMENT / "bin" / "python"
    if (ENVIRONMENT / "ready").exists():
        return ""
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
        [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", RAY_SERVE],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()[-300:]}"
    (ENVIRONMENT / "ready").touch()
    return ""


def compare(rounds: int, cpus: Cpus, folder: Path) -> Results:
    """The figures of both, in rounds that alternate."""
    results, models = Results(), folder / "models"
    for name, config in (("echo", ECHO), ("repeat", REPEAT)):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(config)
    (folder / "empty").mkdir()
    with serving(_serve(folder), cpus) as peer, connected(models, cpus, "repeat") as own:
        router = gateway(folder / "empty", "router", f"--fleet=static:127.0.0.1:{own.port}")
        with serving(router.launch(), cpus) as http_router:
            for number in range(rounds):
                for side in (SERVE, GATEWAY)[:: -1 if number % 2 else 1]:
                    for streams in STREAMS:
                        found = (
                            _of_serve(peer, streams)
                            if side == SERVE
                            else _of_gateway(http_router, own, streams)
                        )
                        results.add(side, found)
    return results


def describe(results: Results) -> Sequence[str]:
    """The medians of both and their ratio, in words."""
    lines = []
    for metric in results.values:
        ours, theirs = (results.median(metric, each) for each in (GATEWAY, SERVE))
        ratio = results.ratio(metric, GATEWAY, SERVE) or 0
        lines.append(f"{metric}: gateway {ours:,.0f}, Ray Serve {theirs:,.0f}, ratio {ratio:.2f}")
    return lines


def _serve(folder: Path) -> Launch:
    ports = free_ports()
    command = [
        *("/usr/bin/env", f"HOME={folder}", f"RAY_TMPDIR={folder}", "RAY_AUTH_MODE=disabled"),
        *("RAY_USAGE_STATS_ENABLED=0", str(ENVIRONMENT / "bin" / "python"), str(APP)),
        str(ports.http),
    ]
    return Launch(name="ray-serve", command=command, ports=ports, ready_path="/-/healthz")


def _figures(way: str, streams: int, found: Figures) -> Mapping[Metric, float]:
    """The latency is measured with one stream only."""
    figures = {Line(f"12-byte items {way}", "item", streams, "stream").rate: found[PER_SEC]}
    if LATENCY in found:
        echo = Line(f"echo of {ECHO_BYTES} bytes {way}", "request")
        figures[echo.lower("latency p50", "us")] = found[LATENCY]
    return figures


def _of_serve(server: Server, streams: int) -> Mapping[Metric, float]:
    port, count = server.ports.http, ITEMS // streams
    asked = {"requests": REQUESTS, "streams": streams, "count": count}
    url = f"http://127.0.0.1:{port}/handle"
    with urlopen(url, json.dumps(asked).encode(), timeout=300) as answer:
        between: dict[str, float] = json.load(answer)
    by_http = {PER_SEC: _events(port, "/items", str(count).encode(), streams, ITEMS)}
    if streams > 1:
        between.pop(LATENCY)
    else:
        by_http[LATENCY] = _latency_us(port, "/echo", bytes(ECHO_BYTES))
    return {
        **_figures("between processes", streams, between),
        **_figures("by HTTP", streams, by_http),
    }


def _of_gateway(server: Server, replica: Responses, streams: int) -> Mapping[Metric, float]:
    port, count = server.ports.http, FASTER * ITEMS // streams
    body = {"text_input": ITEM, "n": count, "delay_us": 0}
    path = "/v2/models/repeat/generate_stream"
    by_http = {PER_SEC: _events(port, path, json.dumps(body).encode(), streams, FASTER * ITEMS)}
    between: dict[str, float] = {PER_SEC: replica.per_sec([_repeat(count)] * streams)}
    if streams == 1:
        text = "x" * ECHO_BYTES
        echo = json.dumps({"text_input": text}).encode()
        by_http[LATENCY] = _latency_us(port, "/v2/models/echo/generate", echo)
        request = InferRequest(
            model="echo", version="1", inputs=(text_tensor("text_input", [text]),)
        )
        between[LATENCY] = replica.median_us(request, REQUESTS)
    return {
        **_figures("between processes", streams, between),
        **_figures("by HTTP", streams, by_http),
    }


def _repeat(count: int) -> InferRequest:
    def number(name: str, value: int) -> Tensor:
        return array_tensor(name, Datatype.INT32, np.array([value], np.int32))

    inputs = (text_tensor("text_input", [ITEM]), number("n", count), number("delay_us", 0))
    return InferRequest(model="repeat", version="1", inputs=inputs)


def _latency_us(port: int, path: str, body: bytes) -> float:
    """The median latency of one client over HTTP."""
    return statistics.median(latencies_us(port, path, body, REQUESTS))


def _events(port: int, path: str, body: bytes, streams: int, expected: int) -> float:
    """Events a second of some streams over HTTP."""
    address = Address(port)

    async def read() -> int:
        transport, counter = await connect(address, lambda: EventCounter(post(path, address, body)))
        found = await counter.done
        transport.close()
        return found.responses

    async def read_all() -> int:
        return sum(await asyncio.gather(*(read() for _ in range(streams))))

    began = time.perf_counter()
    found = uvloop.run(read_all())
    secs = time.perf_counter() - began
    if found != expected:
        raise LoadTestFailed(f"{path} answered {found} items, expected {expected}")
    return found / secs
