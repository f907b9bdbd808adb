"""Servers with and without a rollout: rates, a release before, a failing candidate, a shadow."""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import orjson
from rich.console import Console

from loadtests import start
from loadtests.llm import ARGUMENTS, write_tiny_model
from loadtests.support import generation, rounds
from loadtests.support.findings import Finding
from loadtests.support.generation import Endpoint, Load
from loadtests.support.http_client import Address, call, latencies_us
from loadtests.support.results import Line, Metric, Results
from loadtests.support.rounds import Plan, Step
from loadtests.support.servers import (
    GATEWAY,
    Contender,
    Launch,
    LoadTestFailed,
    Server,
    gateway,
    serving,
    spending,
)

HERE = Path(__file__).parent
WITHOUT, WITH, BEFORE = "without a rollout", "with a rollout", "before"
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
ALL_VERSIONS = "version_policy { all {} }\n"
OF_TENSORS = ("errors", "slow_first_response", "slow", "empty", "nan")
OF_TEXTS = ("errors", "slow_first_response", "slow_tokens", "long_output", "finish:abort")
LEAST_RATE, MOST_SPENT, MOST_LATENCY, MOST_REQUESTS = 0.97, 1.03, 1.05, 100
SHADOW_CPUS = 4
"""One each for the client, the server and both versions: the bound of `shadow` needs them."""
PYTHON, LLM = "plus_one", "llm"
INPUTS = {start.MODEL: "INPUT", PYTHON: "INPUT0"}
FAILING_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("broken")
"""
LOAD = Load(streams=16, requests=4, max_tokens=64)
PROMPT_WORDS = 16
MEASURED = 4
"""Loads of a server in a round, behind one that is not measured."""
GIVEN_UP = 5000
"""Requests without a roll-back."""

Ask = Callable[[Server], Mapping[Metric, float]]
"""Puts a load on a server, and returns its figures."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server whose model gets a second version when it runs, in a rollout if it has a plan."""

    name: str
    repository: Path
    model: str
    ask: Ask

    def contender(self) -> Contender:
        """The server; each start has version 1 only."""

        def launch() -> Launch:
            shutil.rmtree(self._folder / "2", ignore_errors=True)
            state = self.repository.with_name(f"state of {self.repository.name}")
            shutil.rmtree(state, ignore_errors=True)
            return _rolling(self.repository, state, self.name)

        return Contender(self.name, launch)

    def steps(self) -> Sequence[Step]:
        """The second version, the loads, and a look at the rollout."""
        return [
            ("version 2", self._add_version),
            ("warm-up", partial(_unmeasured, self.ask)),
            *[("requests", self.ask)] * MEASURED,
            ("rollout", self._check),
        ]

    @property
    def _folder(self) -> Path:
        return self.repository / self.model

    def _add_version(self, server: Server) -> Mapping[Metric, float]:
        shutil.copytree(self._folder / "1", self._folder / "2")
        call(server.ports.http, f"/v2/repository/models/{self.model}/load", {})
        return {}

    def _check(self, server: Server) -> Mapping[Metric, float]:
        if (self._folder / "rollout.json").exists():
            found = call(server.ports.http, f"/v2/models/{self.model}/rollout")
            if found["state"] != "step":
                raise LoadTestFailed(f"the rollout is in the state {found['state']}: {found}")
        return {}


def identity(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Small inferences with a rollout at half of the requests and five guardrails."""
    line = Line(f"{start.MODEL}, a rollout at 50 %", "infer", 1)
    ask = partial(_requests, asked.requests, start.MODEL, line)
    sides = [Side(each, folder / each, start.MODEL, ask) for each in (WITHOUT, WITH)]
    for side in sides:
        _write_identity(side.repository)
    _write_plan(folder / WITH / start.MODEL, {"weight": 50}, OF_TENSORS)
    _measure(asked, sides, console, results)
    return [_rates(results, line, WITH, WITHOUT)]


def llm(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Streams of a small LLM; without a rollout the client asks one of both versions at random."""
    line = Line(f"small {LLM}, a rollout at 50 %", "token", LOAD.streams, "stream")
    endpoint = generation.generate(LLM)
    named = [
        replace(endpoint, path=f"/v2/models/{LLM}/versions/{each}/generate_stream")
        for each in (1, 2)
    ]
    asks = {WITHOUT: partial(_streams, line, named), WITH: partial(_streams, line, [endpoint])}
    sides = [Side(each, folder / each, LLM, ask) for each, ask in asks.items()]
    for side in sides:
        write_tiny_model(side.repository / LLM, ARGUMENTS)
        with (side.repository / LLM / "config.pbtxt").open("a") as config:
            config.write(ALL_VERSIONS)
    _write_plan(folder / WITH / LLM, {"weight": 50}, OF_TEXTS)
    _measure(asked, sides, console, results)
    return [_rates(results, line, WITH, WITHOUT)]


def before(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Small inferences without a rollout, and those of the revision `--before`."""
    if not asked.before:
        console.print("before: skipped, it needs --before REVISION")
        return []
    source = folder / "source"
    source.mkdir()
    archived = subprocess.run(
        ["git", "-C", str(HERE), "archive", asked.before], capture_output=True, check=False
    )
    if archived.returncode:
        raise LoadTestFailed(f"--before {asked.before}: {archived.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(source)], input=archived.stdout, check=True)
    repository = folder / "repository"
    _write_identity(repository)
    now = gateway(repository)

    def launch() -> Launch:
        found = now.launch()
        at_source = ["/usr/bin/env", f"--chdir={source}", *found.command]
        return replace(found, name=BEFORE, command=at_source)

    line = Line(f"{start.MODEL}, no rollout", "infer", 1)
    ask = partial(_requests, asked.requests, start.MODEL, line)
    steps = [("warm-up", partial(_unmeasured, ask)), *[("requests", ask)] * (2 * MEASURED)]
    plan = Plan(
        [Contender(BEFORE, launch), now],
        dict.fromkeys((BEFORE, GATEWAY), steps),
        asked.rounds,
        asked.server_cpus,
    )
    results.merge(rounds.run(plan, console))
    spent = results.ratio(line.processor_time, GATEWAY, BEFORE) or 0.0
    figure = f"{line.processor_time.unit}, {GATEWAY} over {BEFORE}"
    return [
        _rates(results, line, GATEWAY, BEFORE),
        Finding(figure=figure, value=spent, most=MOST_SPENT),
    ]


def shadow(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """The latency of a Python model while a candidate, a process, gets a copy of each request."""
    line = Line(f"{PYTHON}, each request copied", "infer", 1)
    ask = partial(_requests, asked.requests, PYTHON, line)
    sides = [Side(each, folder / each, PYTHON, ask) for each in (WITHOUT, WITH)]
    for side in sides:
        shutil.copytree(HERE / "python_models" / PYTHON, side.repository / PYTHON)
    _write_plan(folder / WITH / PYTHON, {"shadow": 100}, ("errors",))
    _measure(asked, sides, console, results)
    ratio = results.ratio(_p99(line), WITH, WITHOUT) or 0.0
    most = MOST_LATENCY if len(os.sched_getaffinity(0)) >= SHADOW_CPUS else None
    return [Finding(figure=f"latency p99 over {WITHOUT}", value=ratio, most=most)]


def failing(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """The requests until the weight of a candidate that always fails is 0."""
    model = folder / "models" / PYTHON
    shutil.copytree(HERE / "python_models" / PYTHON, model)
    _write_plan(model, {"weight": 10}, ("errors", "slow", "empty"))
    launch = _rolling(model.parent, folder / "state", GATEWAY)
    with serving(launch, asked.server_cpus) as server:
        (model / "2").mkdir()
        (model / "2" / "model.py").write_text(FAILING_MODEL)
        found = [_until_rolled_back(server) for _ in range(asked.runs)]
    line = Line("a candidate that always fails at 10 %", "rollout")
    for requests in found:
        results.add(GATEWAY, {line.lower("requests until weight 0", ""): requests})
    figure = f"requests until weight 0, median of {asked.runs}"
    return [Finding(figure=figure, value=statistics.median(found), most=MOST_REQUESTS)]


def _rolling(repository: Path, state: Path, name: str) -> Launch:
    """A server that changes its models on request, and has its rollouts in the folder `state`."""
    return gateway(repository, name, *EXPLICIT, f"--state-directory={state}").launch()


def _until_rolled_back(server: Server) -> int:
    """The requests of a new rollout, one after the other, until it is rolled back."""
    at = f"/v2/models/{PYTHON}"
    call(server.ports.http, f"{at}/rollout/start", {"version": 2, "again": True})
    for requests in range(1, GIVEN_UP):
        try:
            call(server.ports.http, f"{at}/infer", _question(PYTHON))
        except HTTPError as error:
            error.close()
        if call(server.ports.http, f"{at}/rollout")["state"] == "rolled_back":
            return requests
    raise LoadTestFailed(f"the candidate is not rolled back after {GIVEN_UP} requests")


def _write_identity(repository: Path) -> None:
    (repository / start.MODEL / "1").mkdir(parents=True)
    (repository / start.MODEL / "config.pbtxt").write_text(start.CONFIG + ALL_VERSIONS)


def _write_plan(model: Path, first: Mapping[str, int], guardrails: Sequence[str]) -> None:
    """A plan whose first step lasts longer than the measurement."""
    steps = [{**first, "for": "1h"}, {"weight": 100, "for": "1h"}]
    plan = {"steps": steps, "guardrails": {name: {} for name in guardrails}}
    (model / "rollout.json").write_text(json.dumps(plan))


def _measure(
    asked: argparse.Namespace, sides: Sequence[Side], console: Console, results: Results
) -> None:
    contenders = [each.contender() for each in sides]
    steps = {each.name: each.steps() for each in sides}
    results.merge(rounds.run(Plan(contenders, steps, asked.rounds, asked.server_cpus), console))


def _rates(results: Results, line: Line, side: str, peer: str) -> Finding:
    ratio = results.ratio(line.rate, side, peer) or 0.0
    return Finding(figure=f"{line.rate.unit}, {side} over {peer}", value=ratio, least=LEAST_RATE)


def _p99(line: Line) -> Metric:
    return line.lower("latency p99", "us")


def _unmeasured(ask: Ask, server: Server) -> Mapping[Metric, float]:
    ask(server)
    return {}


def _question(model: str) -> Mapping[str, Any]:
    tensor = {"name": INPUTS[model], "datatype": "FP32", "shape": [16], "data": [0.5] * 16}
    return {"inputs": [tensor]}


def _requests(count: int, model: str, line: Line, server: Server) -> Mapping[Metric, float]:
    """Requests of one client, one after the other."""
    body, path = orjson.dumps(_question(model)), f"/v2/models/{model}/infer"
    with spending(server.pid) as spent:
        began = time.perf_counter()
        took_us = latencies_us(server.ports.http, path, body, count)
        secs = time.perf_counter() - began
    p99 = statistics.quantiles(took_us, n=100)[98]
    return {**line.costs(count / secs, spent.secs / count * 1e6), _p99(line): p99}


def _streams(line: Line, endpoints: Sequence[Endpoint], server: Server) -> Mapping[Metric, float]:
    """Concurrent streams, whose requests are for one of the endpoints at random.

    In turn, all streams would ask the same version at a time, and its engine had larger batches.
    """
    chosen = random.Random(0)

    def encode(address: Address, prompt: str, tokens: int) -> bytes:
        return chosen.choice(endpoints).encode(address, prompt, tokens)

    words = generation.prompts(PROMPT_WORDS, generation.WARM_UP_SEED)
    with spending(server.pid) as spent:
        outcome = generation.put(LOAD, Address(server.ports.http), encode, words)
    return line.costs(LOAD.tokens / outcome.secs, spent.secs / LOAD.tokens * 1e6)
