"""The order of the steps of several servers."""

import sys

from rich.console import Console

from loadtests.support.results import Line, Metric
from loadtests.support.rounds import Plan, Step, run
from loadtests.support.servers import (
    Contender,
    Cpus,
    Launch,
    Server,
    free_ports,
    is_running,
)

RATE = Line("load", "infer").rate


def files_server(name: str) -> Contender:
    def launch() -> Launch:
        ports = free_ports()
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(ports.http)]
        return Launch(name=name, command=command, ports=ports, ready_path="/", poll_secs=0.05)

    return Contender(name, launch)


def test_each_step_measures_all_servers_of_a_round_in_turn() -> None:
    measured: list[tuple[str, str]] = []
    running: dict[str, int] = {}

    def step(name: str) -> Step:
        def measure(server: Server) -> dict[Metric, float]:
            measured.append((name, server.name))
            running[server.name] = server.pid
            return {RATE: len(measured)}

        return name, measure

    steps = {
        "a": [step("small"), step("large")],
        "b": [step("small"), step("large"), step("more")],
    }
    plan = Plan([files_server("a"), files_server("b")], steps, rounds=2, server_cpus=Cpus())
    results = run(plan, Console(quiet=True))
    first = [("small", "a"), ("small", "b"), ("large", "b"), ("large", "a")]
    second = [("small", "b"), ("small", "a"), ("large", "a"), ("large", "b"), ("more", "b")]
    assert measured == [*first, ("more", "b"), *second]
    assert results.values[RATE] == {"a": [1, 4, 7, 8], "b": [2, 3, 5, 6, 9, 10]}
    assert not any(map(is_running, running.values()))
