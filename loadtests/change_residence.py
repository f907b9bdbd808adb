"""More models than fit: wakes of models by Zipf against an ideal cache, and of two in turn."""

import argparse
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import orjson
from rich.console import Console

from loadtests.support.findings import Finding
from loadtests.support.http_client import ADD_SUB_BODY, call
from loadtests.support.results import Line, Results
from loadtests.support.servers import (
    GATEWAY,
    Server,
    gateway,
    read_metrics,
    serving,
    total,
)

MODEL = Path(__file__).parent / "models" / "add_sub"
"""A model of ONNX Runtime."""
MODELS, BUDGET = 20, 5
ZIPF, RATE, CLIENTS = 1.0, 2.0, 32
STAY_SECS, MOST_WAIT_SECS = 30.0, 60.0
WAKES = "gateway_model_wakes_total"
RESERVE_SECS = 5.0
"""Time for a load, above the longest wait for a place."""
SEED = 1
PAUSE_SECS = 0.05


def zipf(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """Requests for one of many models, against a cache of the models used least recently."""
    names = _write_models(folder, MODELS)
    shares = [1 / place**ZIPF for place in range(1, MODELS + 1)]
    trace = Random(SEED).choices(names, shares, k=int(asked.secs * RATE))
    flags = ("--on-demand", f"--max-resident-models={BUDGET}")
    waits: deque[float] = deque()
    with (
        serving(gateway(folder, GATEWAY, *flags).launch(), asked.server_cpus) as server,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        began = time.perf_counter()
        for place, name in enumerate(trace):
            time.sleep(max(0.0, began + place / RATE - time.perf_counter()))
            clients.submit(_ask, server, name, waits)
        clients.shutdown()
        wakes = total(read_metrics(server.ports.metrics), WAKES)
    ideal = ideal_wakes(trace, BUDGET)
    line = Line(f"{MODELS} models by Zipf, places for {BUDGET}", "request")
    found = {line.lower("wakes", ""): wakes, line.lower("longest wait", "s"): max(waits)}
    results.add(GATEWAY, found)
    results.add("ideal cache", {line.lower("wakes", ""): ideal})
    return [
        Finding(figure="requests answered", value=len(waits), least=len(trace)),
        Finding(figure=f"wakes over the {ideal} of an ideal cache", value=wakes / ideal, most=1.1),
        Finding(figure="longest wait", value=max(waits), unit="s"),
    ]


def turns(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """Two clients, each with a model of its own, and a place for one."""
    names = _write_models(folder, 2)
    waits: deque[float] = deque()
    ended = threading.Event()
    flags = ("--on-demand", "--max-resident-models=1")
    with (
        serving(gateway(folder, GATEWAY, *flags).launch(), asked.server_cpus) as server,
        ThreadPoolExecutor(len(names)) as clients,
    ):
        began = time.perf_counter()
        asking = [clients.submit(_keep_asking, server, each, waits, ended) for each in names]
        time.sleep(asked.secs)
        ended.set()
        for each in asking:
            each.result()
        secs = time.perf_counter() - began
        wakes = total(read_metrics(server.ports.metrics), WAKES)
    line = Line("two models in turn, a place for one", "request")
    found = {line.lower("wakes", ""): wakes, line.lower("longest wait", "s"): max(waits)}
    results.add(GATEWAY, found)
    most = len(names) * (secs // STAY_SECS + 1)
    longest = MOST_WAIT_SECS + RESERVE_SECS
    return [
        Finding(figure=f"wakes in {secs:.0f} s", value=wakes, most=most),
        Finding(figure="longest wait", value=max(waits), unit="s", most=longest),
    ]


def ideal_wakes(trace: Sequence[str], places: int) -> int:
    """The loads of a cache that drops the model that was used least recently."""
    cache: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for name in trace:
        if name not in cache:
            loads += 1
            if len(cache) == places:
                cache.popitem(last=False)
        cache[name] = None
        cache.move_to_end(name)
    return loads


def _keep_asking(server: Server, model: str, waits: deque[float], ended: threading.Event) -> None:
    while not ended.wait(PAUSE_SECS):
        _ask(server, model, waits)


def _ask(server: Server, model: str, waits: deque[float]) -> None:
    began = time.perf_counter()
    call(server.ports.http, f"/v2/models/{model}/infer", orjson.loads(ADD_SUB_BODY))
    waits.append(time.perf_counter() - began)


def _write_models(folder: Path, count: int) -> Sequence[str]:
    names = [f"model_{number}" for number in range(count)]
    for name in names:
        shutil.copytree(MODEL, folder / name)
    return names
