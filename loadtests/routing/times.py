"""Processor time of one choice among 1,000 replicas for a prompt of 32k tokens."""

import statistics
import time
from random import Random

from gateway.fleet.choice import Demand, KnownReplica, Load, ReplicaState, choose
from gateway.fleet.keys import PIECE_BYTES, PrefixScope, PromptKeys
from gateway.fleet.prefixes import KeyChanges, KeyIndex

REPLICAS = 1000
PROMPT_BYTES = 1 << 17
KEY_TOKENS = PIECE_BYTES // 4
OTHER_KEYS = 300
TRIES = 60
SCOPE = PrefixScope(model="model", version="1")


def times_of_a_choice(random: Random) -> str:
    """Medians in milliseconds: of the keys, and of a choice by the replicas with a prefix."""
    text = "".join(random.choices("abcdefgh ", k=PROMPT_BYTES))
    keys = PromptKeys(random.randbytes(32))
    of_keys = [_secs_of_keys(keys, text) for _ in range(TRIES)]
    chain = keys.of_text(SCOPE, text)
    parts = [f"keys of a prompt of {PROMPT_BYTES:,} bytes: {_ms(of_keys)}"]
    for holders in (0, 16, REPLICAS):
        of_choice = _secs_of_choices(chain, holders, random)
        parts.append(f"choice, {holders} of {REPLICAS} replicas have a prefix: {_ms(of_choice)}")
    return "; ".join(parts)


def _ms(secs: list[float]) -> str:
    return f"{statistics.median(secs) * 1e3:.2f} ms"


def _secs_of_keys(keys: PromptKeys, text: str) -> float:
    began = time.thread_time()
    keys.of_text(SCOPE, text)
    return time.thread_time() - began


def _secs_of_choices(chain: tuple[bytes, ...], holders: int, random: Random) -> list[float]:
    """Each choice is counted as a call, and its keys are expected of its replica."""
    index = KeyIndex()
    replicas = [_replica(number, random) for number in range(REPLICAS)]
    for number, each in enumerate(replicas):
        prefix = chain[: random.randint(1, len(chain))] if number < holders else ()
        others = [random.randbytes(8) for _ in range(OTHER_KEYS)]
        index.announce(each.id, KeyChanges(gained=[*others, *prefix]))
    found = []
    for call in range(1, TRIES + 1):
        began = time.thread_time()
        held = index.held(chain, float(call))
        tokens = {name: depth * KEY_TOKENS for name, depth in held.items()}
        demand = Demand(tokens=len(chain) * KEY_TOKENS, held=tokens)
        chosen = choose(demand, replicas, now=float(call), random=random)
        if chosen is not None:
            chosen.send(call, chosen.work(demand))
            index.expect(chosen.id, chain, float(call))
        found.append(time.thread_time() - began)
    return found


def _replica(number: int, random: Random) -> KnownReplica:
    load = Load(
        seen=0,
        waiting_tokens=random.randrange(50_000),
        running=random.randrange(30),
        queued=0,
        prefill_rate=12_000.0,
        step_secs=0.008,
        kv_used=random.random(),
        room=1000,
        state=ReplicaState.READY,
    )
    return KnownReplica(f"replica-{number}", load, distance_secs=0.001)
