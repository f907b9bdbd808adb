"""Sessions of a stand-in LLM on two replicas: the part of prompts that their caches hold."""

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random

from loadtests import caching_llm
from loadtests.support.servers import (
    Cpus,
    Launch,
    LoadTestFailed,
    Server,
    gateway,
    replica,
    serving,
)

SESSIONS, TURNS, TURN_BYTES, CLIENTS = 48, 4, 6000, 2
COMMON_PROMPTS = 6
WARM_UP = 20
ROOT = Path(__file__).parents[1]
GENERATE = f"/v2/models/{caching_llm.NAME}/generate"


def cached_shares(folder: Path, cpus: Cpus, seed: int = 1) -> str:
    """The cached share of the prompts of the same sessions on one replica and on two."""
    repository = folder / "llms" / caching_llm.NAME
    (repository / "1").mkdir(parents=True)
    (repository / "config.pbtxt").write_text(caching_llm.CONFIG)
    found = caching_llm.install(folder / "packages")
    with _routers(repository.parent, found, cpus, (1,)) as routers:
        one = _converse(routers, seed)
    with _routers(repository.parent, found, cpus, (2,)) as routers:
        two = _converse(routers, seed)
    with _routers(repository.parent, found, cpus, (1, 1)) as routers:
        in_turn = _converse(routers, seed)
    return (
        f"cached share of the prompts of {SESSIONS} sessions of {TURNS} turns: one replica "
        f"{one:.1%}, two behind a router {two:.1%} ({two / one:.2f}), two in turn {in_turn:.1%} "
        f"({in_turn / one:.2f})"
    )


@contextmanager
def _routers(
    repository: Path, packages: Path, cpus: Cpus, sizes: Sequence[int]
) -> Iterator[Sequence[Server]]:
    """A router for each of the sizes, which are numbers of replicas."""
    empty = repository.parent / "empty"
    empty.mkdir(exist_ok=True)
    with ExitStack() as owner:
        routers = []
        for number, size in enumerate(sizes):
            launches = [_replica(repository, packages, f"{number}-{each}") for each in range(size)]
            for each in launches:
                owner.enter_context(serving(each, cpus))
            places = ",".join(f"127.0.0.1:{each.ports.grpc}" for each in launches)
            router = gateway(empty, f"router {number}", f"--fleet=static:{places}")
            routers.append(owner.enter_context(serving(router.launch(), cpus)))
        yield routers


def _replica(repository: Path, packages: Path, name: str) -> Launch:
    launch = replica(repository, f"llm {name}", caching_llm.NAME)
    path = f"PYTHONPATH={packages}:{ROOT}"
    return replace(launch, command=["/usr/bin/env", path, *launch.command])


def _converse(routers: Sequence[Server], seed: int) -> float:
    """A turn of each session, then the next turn; the cached share of their prompts."""
    chance, turn = Random(seed), cycle(routers)
    common = [_words(chance, TURN_BYTES) for _ in range(COMMON_PROMPTS)]
    prompts = [common[number % COMMON_PROMPTS] for number in range(SESSIONS)]
    tokens = cached = 0
    with ThreadPoolExecutor(CLIENTS) as clients:
        texts = [_words(chance, TURN_BYTES) for _ in range(WARM_UP)]
        list(clients.map(_ask, texts, turn))
        for _ in range(TURNS):
            order = chance.sample(range(SESSIONS), SESSIONS)
            for number in order:
                prompts[number] += _words(chance, TURN_BYTES)
            for answer in clients.map(_ask, [prompts[number] for number in order], turn):
                tokens += answer[0]
                cached += answer[1]
    return cached / tokens


def _words(chance: Random, size: int) -> str:
    return "".join(chance.choices("abcdefgh ", k=size))


def _ask(prompt: str, router: Server) -> tuple[int, int]:
    """The tokens of a prompt, and those that were in the cache."""
    client = http.client.HTTPConnection("127.0.0.1", router.ports.http)
    client.request("POST", GENERATE, json.dumps({"text_input": prompt}))
    response = client.getresponse()
    body = response.read()
    client.close()
    if response.status != http.client.OK:
        raise LoadTestFailed(f"{router.name} answered {response.status}: {body[:200]!r}")
    found = json.loads(json.loads(body)["text_output"])
    return found["prompt"], found["cached"]
