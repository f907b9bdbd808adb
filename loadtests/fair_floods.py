"""Floods: a quiet tenant, weights, and ten times the capacity with deadlines."""

import argparse
import json
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from loadtests.support import generation, rounds, servers
from loadtests.support.curves import Panel, draw
from loadtests.support.findings import Finding
from loadtests.support.generation import Endpoint, gateway_defaults, read_model
from loadtests.support.http_client import Address, post, with_headers
from loadtests.support.results import Line, Metric, Results, quantile
from loadtests.support.rounds import Plan, Step
from loadtests.support.servers import GATEWAY, Contender, Server, gateway, read_metrics, total
from loadtests.support.timed_load import Flow, Sent, answered, send
from loadtests.tenants import Keys, write_tenants

HERE = Path(__file__).parent
LLAMA = HERE.parent / "model_repository" / "llama"
VLLM = "vllm"
PLACES = 8
"""Sequences that the engine computes at once: more requests wait."""
PROMPT_WORDS = 32
FLOOD, QUIET = 10.0, 0.05
"""Rates as multiples of the capacity."""
CAPACITY_SECS = 15.0
DEADLINE_MS, LONG_MS = 5000, 600_000
EXCEEDED = "deadline exceeded"
"""A part of the error of a request that was admitted, and has missed its deadline."""
ALONE = "alone"


def write_llm(folder: Path) -> Path:
    """A repository with SmolLM2, whose engine has few places."""
    shutil.copytree(LLAMA, folder / LLAMA.name)
    file = folder / LLAMA.name / "1" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_num_seqs": PLACES}))
    return folder


def quiet(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """The first token of a quiet tenant, alone and with a flood, here and at vLLM's server."""
    keys = write_tenants(folder / "keys.toml", {"flood": {}, "quiet": {}})
    repository = write_llm(folder / "repository")
    contenders = _contenders(repository, keys)
    steps = {name: _quiet_steps(asked, endpoint, keys) for name, endpoint in ENDPOINTS.items()}
    found = rounds.run(Plan(contenders, steps, asked.rounds, asked.server_cpus), console)
    results.merge(found)
    alone, flooded = _quiet_line(ALONE), _quiet_line("flood")
    gap = results.median(flooded.other("time between completions", "s"), GATEWAY)
    p50 = results.median(flooded.lower("TTFT p50", "s"), GATEWAY)
    own = results.median(alone.lower("TTFT p50", "s"), GATEWAY)
    p99 = results.ratio(flooded.lower("TTFT p99", "s"), GATEWAY, VLLM) or 0.0
    rate = results.ratio(flooded.rate, GATEWAY, VLLM) or 0.0
    most = own + 3 * gap
    return [
        Finding(figure="TTFT p50 with a flood", value=p50, unit="s", most=most),
        Finding(figure=f"TTFT p99 with a flood over {VLLM}", value=p99, most=0.1),
        Finding(figure=f"token/s with a flood over {VLLM}", value=rate, least=0.98),
    ]


def weights(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """The service of two floods whose tenants have the weights 3 and 1: tokens, and tensors."""
    keys = write_tenants(folder / "keys.toml", {"three": {"weight": 3.0}, "one": {}})
    repository = write_llm(folder / "repository")
    _write_slow(repository / SLOW)
    steps: Sequence[Step] = [
        ("tokens", partial(_shares, asked.secs, _token_requests(keys), "token")),
        ("tensors", partial(_shares, asked.secs, _tensor_requests(keys), "tensor")),
    ]
    contenders = [gateway(repository, GATEWAY, f"--api-keys={keys.file}")]
    found = rounds.run(Plan(contenders, {GATEWAY: steps}, asked.rounds, asked.server_cpus), console)
    results.merge(found)
    return [
        Finding(
            figure=f"{kind}s of weight 3 over those of weight 1",
            value=results.median(_share_metric(kind), GATEWAY),
            least=2.7,
            most=3.3,
        )
        for kind in ("token", "tensor")
    ]


def overload(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Ten times the capacity, at fixed times, with a deadline of the first token."""
    keys = write_tenants(folder / "keys.toml", {"flood": {}})
    contenders = _contenders(write_llm(folder / "repository"), keys)
    steps = {
        name: [("overload", partial(_overload, asked, endpoint, keys))]
        for name, endpoint in ENDPOINTS.items()
    }
    found = rounds.run(Plan(contenders, steps, asked.rounds, asked.server_cpus), console)
    results.merge(found)
    line = OVERLOAD
    in_time = results.median(line.other("in time", "of capacity"), GATEWAY)
    theirs = results.median(line.other("in time", "of capacity"), VLLM)
    refusal = results.median(line.lower("refusal p99", "ms"), GATEWAY)
    predicted = results.median(line.other("real/predicted p50"), GATEWAY)
    late = results.median(line.lower("admitted late", "%"), GATEWAY)
    return [
        Finding(figure="in time, of capacity", value=in_time, least=0.9),
        Finding(figure=f"in time, of capacity, {VLLM}", value=theirs),
        Finding(figure="refusal p99", value=refusal, unit="ms", most=50),
        Finding(figure="real/predicted p50", value=predicted, least=0.6, most=1.1),
        Finding(figure="admitted late", value=late, unit="%", most=5),
    ]


ENDPOINTS: Mapping[str, Endpoint] = {
    VLLM: generation.completions(LLAMA.name),
    GATEWAY: generation.generate(LLAMA.name),
}
OVERLOAD = Line("10 times the capacity, first token within 5 s", "token")


def _contenders(repository: Path, keys: Keys) -> Sequence[Contender]:
    flags = read_model(repository / LLAMA.name, gateway_defaults()).flags
    return [
        servers.vllm(LLAMA.name, flags),
        gateway(repository, GATEWAY, f"--api-keys={keys.file}", "--metrics-open=true"),
    ]


def _requests(
    endpoint: Endpoint, server: Server, tokens: int, headers: Mapping[str, str], seed: int
) -> Callable[[int], bytes]:
    """Requests with prompts of their own, and answers of half to one and a half of the tokens.

    Answers of one length would end together, and all places become free at once.
    """
    address = Address(server.ports.http)
    words = generation.prompts(PROMPT_WORDS, seed)
    lengths = random.Random(seed)

    def request(_: int) -> bytes:
        length = lengths.randint(tokens - tokens // 2, tokens + tokens // 2)
        return with_headers(endpoint.encode(address, next(words), length), headers)

    return request


def _capacity(
    asked: argparse.Namespace, endpoint: Endpoint, server: Server, headers: Mapping[str, str]
) -> float:
    """Requests per second of twice as many clients as there are places."""
    request = _requests(endpoint, server, asked.max_tokens, headers, seed=1)
    group = [request(number) for number in range(2 * PLACES)]
    (sent,) = answered(Address(server.ports.http), [group], CAPACITY_SECS)
    return sum(each.events for each in sent) / asked.max_tokens / CAPACITY_SECS


def _quiet_line(load: str) -> Line:
    return Line(f"a quiet tenant, {load}", "token")


def _quiet_steps(asked: argparse.Namespace, endpoint: Endpoint, keys: Keys) -> Sequence[Step]:
    return [(load, partial(_quiet, asked, endpoint, keys, load)) for load in (ALONE, "flood")]


def _quiet(
    asked: argparse.Namespace, endpoint: Endpoint, keys: Keys, load: str, server: Server
) -> Mapping[Metric, float]:
    capacity = _capacity(asked, endpoint, server, keys.headers("quiet"))
    few = _requests(endpoint, server, asked.max_tokens, keys.headers("quiet"), seed=2)
    many = _requests(endpoint, server, asked.max_tokens, keys.headers("flood"), seed=3)
    flows = [Flow(QUIET * capacity, few)]
    flows += [Flow(FLOOD * capacity, many)] if load != ALONE else []
    began = time.perf_counter()
    sent = send(Address(server.ports.http), flows, asked.secs)
    until = time.perf_counter()
    waits = [each.waited(until) for each in sent[0]]
    ended = sum(each.complete for flow in sent for each in flow)
    events = sum(each.events for flow in sent for each in flow)
    line = _quiet_line(load)
    return {
        line.rate: events / (until - began),
        line.lower("TTFT p50", "s"): statistics.median(waits),
        line.lower("TTFT p99", "s"): quantile(waits, 0.99),
        line.other("time between completions", "s"): (until - began) / max(1, ended),
    }


def _overload(
    asked: argparse.Namespace, endpoint: Endpoint, keys: Keys, server: Server
) -> Mapping[Metric, float]:
    own = keys.headers("flood")
    headers = {**own, "x-request-timeout-ms": str(DEADLINE_MS)}
    # Clients with deadlines have them before an overload, too: the model has been observed.
    capacity = _capacity(asked, endpoint, server, {**own, "x-request-timeout-ms": str(LONG_MS)})
    request = _requests(endpoint, server, asked.max_tokens, headers, seed=4)
    address = Address(server.ports.http)
    (sent,) = send(address, [Flow(FLOOD * capacity, request)], asked.secs, DEADLINE_MS / 1000)
    line = OVERLOAD
    found = of_overload(line, sent, capacity * asked.secs, DEADLINE_MS / 1000)
    found[line.rate] = sum(each.events for each in sent) / asked.secs
    if server.name == GATEWAY:
        found[line.other("real/predicted p50")] = histogram_p50(
            read_metrics(server.ports.metrics), "gateway_admission_wait_ratio"
        )
        if asked.to is not None:
            draw_waits(asked.to, sent)
    return found


def of_overload(
    line: Line, sent: Sequence[Sent], capacity: float, deadline_secs: float
) -> dict[Metric, float]:
    """The figures of an overload, in which `capacity` requests could have been answered."""
    in_time = sum(
        bool(each.first) and each.first - each.at <= deadline_secs and not each.refusal
        for each in sent
    )
    # The first ones find an empty server: they are beyond its capacity.
    refused = [
        (each.ended - each.at) * 1e3
        for each in sent
        if each.refusal and EXCEEDED not in each.refusal
    ]
    admitted = len(sent) - len(refused)
    return {
        line.other("in time", "of capacity"): in_time / capacity,
        line.lower("refusal p99", "ms"): quantile(refused, 0.99),
        line.lower("admitted late", "%"): 100 * (admitted - in_time) / max(1, admitted),
    }


EXPECTED = re.compile(r"expected in (\d+) ms")
"""The predicted wait in the text of a refusal."""


def draw_waits(path: Path, sent: Sequence[Sent]) -> None:
    """Draw the waits that were predicted in refusals, and the real ones of admitted requests.

    Each is the mean of those sent in the same second; a second without any has that before.
    """
    began = sent[0].at
    real = [(each.at - began, each.first - each.at) for each in sent if each.first]
    predicted = [
        (each.at - began, float(found[1]) / 1e3)
        for each in sent
        if (found := EXPECTED.search(each.refusal))
    ]
    secs = range(int(sent[-1].at - began) + 1)
    panels = [
        Panel("wait predicted in refusals, s", _means(predicted, secs)),
        Panel("wait of admitted requests, s", _means(real, secs)),
    ]
    draw(path, OVERLOAD.name, secs, panels)


def _means(waits: Sequence[tuple[float, float]], secs: Sequence[int]) -> Sequence[float]:
    found: list[float] = []
    for second in secs:
        these = [wait for at, wait in waits if int(at) == second]
        found.append(statistics.fmean(these) if these else found[-1] if found else 0.0)
    return found


def histogram_p50(lines: Sequence[str], name: str) -> float:
    """The upper bound of the bucket with the median of a histogram of the metrics page."""
    whole = total(lines, f"{name}_count")
    buckets = [line for line in lines if line.startswith(f"{name}_bucket{{")]
    for line in buckets:
        bound = line.partition('le="')[2].partition('"')[0]
        if float(line.rsplit(" ", 1)[1]) >= whole / 2:
            return float(bound)
    return 0.0


SLOW = "slow"
SLOW_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""
SLOW_MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        inputs = [pb_utils.get_input_tensor_by_name(each, "INPUT") for each in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", each.as_numpy())])
            for each in inputs
        ]
"""
SLOW_PATH = f"/v2/models/{SLOW}/generate_stream"
CLIENTS = 24


def _write_slow(model: Path) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(SLOW_CONFIG)
    (model / "1" / "model.py").write_text(SLOW_MODEL)


Groups = Callable[[Server], Sequence[Sequence[bytes]]]
"""The requests of the clients of each tenant."""


def _token_requests(keys: Keys) -> Groups:
    def groups(server: Server) -> Sequence[Sequence[bytes]]:
        return [list(islice(_each(keys, tenant, server), CLIENTS)) for tenant in ("three", "one")]

    return groups


def _each(keys: Keys, tenant: str, server: Server) -> Iterator[bytes]:
    request = _requests(ENDPOINTS[GATEWAY], server, 32, keys.headers(tenant), seed=5)
    while True:
        yield request(0)


def _tensor_requests(keys: Keys) -> Groups:
    def groups(server: Server) -> Sequence[Sequence[bytes]]:
        plain = post(SLOW_PATH, Address(server.ports.http), b'{"INPUT": 1.0}')
        return [
            [with_headers(plain, keys.headers(tenant))] * CLIENTS for tenant in ("three", "one")
        ]

    return groups


def _share_metric(kind: str) -> Metric:
    return Line("two floods of weights 3 and 1", kind).other("of weight 3 over weight 1")


def _shares(secs: float, groups: Groups, kind: str, server: Server) -> Mapping[Metric, float]:
    three, one = answered(Address(server.ports.http), groups(server), secs)
    return {_share_metric(kind): _events(three) / max(1, _events(one))}


def _events(sent: Sequence[Sent]) -> int:
    return sum(each.events for each in sent)
