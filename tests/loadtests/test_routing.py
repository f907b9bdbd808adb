"""The simulation of a fleet: its engine by hand, its requests, and the rules in short runs."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from loadtests.routing.engine import (
    PREFILL_RATE,
    STEP_SECS,
    STEP_SECS_OF_SEQUENCE,
    BlockCache,
    Engine,
    Served,
)
from loadtests.routing.fleet import Fleet, Options, Outcome, quantile
from loadtests.routing.policies import COST, RULES, Others
from loadtests.routing.workload import (
    BLOCK_TOKENS,
    Prompt,
    key_of,
    read_trace,
    synthetic,
)
from loadtests.support.servers import LoadTestFailed
from tests.serving import ROOT

CHUNK_SECS = STEP_SECS + 2048 / PREFILL_RATE
DECODE_SECS = STEP_SECS + STEP_SECS_OF_SEQUENCE
SESSIONS = synthetic(7.2, 200, Random(5))


def prompt(*blocks: int, at: float = 0.0, answer: int = 10, tokens: int = 0) -> Prompt:
    return Prompt(at, tokens or len(blocks) * BLOCK_TOKENS, answer, tuple(map(key_of, blocks)))


def push(engine: Engine, *prompts: Prompt) -> list[Served]:
    served = [Served(each, 0, call) for call, each in enumerate(prompts, 1)]
    for each in served:
        engine.push(each, each.prompt.at)
    return served


def finish(engine: Engine) -> None:
    while engine.in_flight:
        engine.advance()


def run(prompts: Sequence[Prompt] = SESSIONS, **options: object) -> Outcome:
    return Fleet(Options(**{"replicas": 8, **options})).run(prompts, lambda: None)


@cache
def undisturbed() -> Outcome:
    """One router with fresh loads."""
    return run()


def test_a_prompt_is_computed_in_chunks_and_its_answer_in_steps() -> None:
    engine = Engine(1)
    (served,) = push(engine, prompt(*range(8), answer=11))
    finish(engine)
    assert served.first_at == pytest.approx(2 * CHUNK_SECS)
    assert served.last_at == pytest.approx(2 * CHUNK_SECS + 10 * DECODE_SECS)


def test_a_prompt_in_the_cache_is_computed_but_for_one_token() -> None:
    engine = Engine(1)
    push(engine, prompt(1, 2, 3, 4, answer=1))
    finish(engine)
    (again,) = push(engine, prompt(1, 2, 3, 4, at=9.0, answer=1))
    finish(engine)
    assert again.cached == 4
    assert again.first_at == pytest.approx(9 + STEP_SECS + 1 / PREFILL_RATE)


def test_an_arrival_waits_for_one_step_of_running_answers() -> None:
    engine = Engine(1)
    running, arriving = prompt(1, answer=1000), prompt(2, at=1.0, answer=1)
    first = Served(running, 0, 1)
    engine.push(first, 0.0)
    engine.advance()
    (late,) = push(engine, arriving)
    finish(engine)
    computed = DECODE_SECS + BLOCK_TOKENS / PREFILL_RATE
    assert 1.0 + computed <= late.first_at <= 1.0 + computed + DECODE_SECS
    expected = first.first_at + 999 * DECODE_SECS + BLOCK_TOKENS / PREFILL_RATE
    assert first.last_at == pytest.approx(expected)


def test_a_request_waits_until_its_blocks_fit() -> None:
    engine = Engine(1, blocks=10)
    first, second = push(engine, prompt(*range(6), answer=512), prompt(*range(10, 16), answer=1))
    assert engine.load(0, 0.0).kv_used == pytest.approx(0.7)
    finish(engine)
    assert second.first_at > first.last_at


def test_blocks_in_use_do_not_take_the_place_of_idle_ones() -> None:
    cache = BlockCache(7)
    other, repeated = (Served(prompt(*each, answer=1), 0, 1) for each in ((1, 2, 3), (4, 5, 6)))
    for served in (other, repeated):
        assert cache.take(served)
        cache.release(served)
    assert cache.take(repeated)
    assert repeated.cached == 3
    assert cache.matched(other.prompt.keys) == 3


def test_a_load_counts_the_tokens_that_are_not_in_the_cache() -> None:
    engine = Engine(1)
    push(engine, prompt(1, 2, 3, 4, answer=1))
    finish(engine)
    push(engine, prompt(*range(10, 18), at=5.0), prompt(1, 2, 3, 9, at=5.0))
    load = engine.load(0, 5.0)
    assert (load.seen, load.waiting_tokens, load.queued) == (2, 9 * BLOCK_TOKENS, 1)


def test_sessions_are_as_long_as_those_of_the_trace_and_continue_their_prompts() -> None:
    found = synthetic(20.0, 2000, Random(1))
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert found[-1].at == pytest.approx(100, rel=0.15)
    assert sum(each.tokens for each in found) / 2000 == pytest.approx(12_800, rel=0.1)
    assert sum(each.answer for each in found) / 2000 == pytest.approx(347, rel=0.1)
    seen: set[bytes] = set()
    known = 0
    for each in found:
        known += sum(key in seen for key in each.keys)
        seen.update(each.keys)
    assert 0.5 < known / sum(len(each.keys) for each in found) < 0.8


def test_a_trace_of_mooncake_is_read_and_spread(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 512, "output_length": 6, "hash_ids": [0]},
        {"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
    ]
    path = tmp_path / "conversation.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = read_trace(path, 1.0, 10)
    assert [each.at for each in found] == [0.0, 1.5, 3.0]
    assert [len(each.keys) for each in found] == [2, 1, 1]
    assert found[0].keys[0] == found[1].keys[0]
    assert [each.answer for each in found] == [5, 6, 1]


def test_a_trace_of_azure_is_read_without_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    times = ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690")
    rows = "".join(f"{each},1024,{number}\n" for number, each in enumerate(times, 4))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    first, second = read_trace(path, 0.5, 10)
    assert (first.at, second.at) == (0.0, pytest.approx(4.0))
    assert (first.tokens, first.answer) == (1024, 4)
    assert len({*first.keys, *second.keys}) == 4


@pytest.mark.parametrize("text", ["", "{}\n", "not JSON\n", '{"timestamp": 1}\n'])
def test_a_file_that_is_no_trace_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(LoadTestFailed, match=r"trace 'bad\.jsonl'"):
        read_trace(path, 1.0, 10)


@pytest.mark.parametrize("policy", [COST, *RULES])
def test_each_rule_ends_every_request(policy: str) -> None:
    outcome = run(policy=policy)
    assert len(outcome.served) == 200
    assert all(each.prompt.at < each.first_at <= each.last_at for each in outcome.served)
    assert 0 < outcome.mean < outcome.p99
    assert 0 < outcome.cached_share < 1


def test_the_least_cost_is_sooner_than_rules_without_prefixes() -> None:
    mean = undisturbed().mean
    assert mean < 0.6 * run(policy="round-robin").mean
    assert mean < 0.8 * run(policy="fewest-requests").mean


def test_routers_that_share_and_old_loads_cost_little() -> None:
    assert run(routers=4).mean < 1.25 * undisturbed().mean
    assert run(load_secs=1.0, prompt_secs=1.0).mean < 1.25 * undisturbed().mean


def test_another_router_knows_a_prompt_after_five_milliseconds() -> None:
    def pairs(secs: float) -> Outcome:
        times = [start + late for start in range(0, 400, 20) for late in (0.0, secs)]
        found = [prompt(*range(20 * n, 20 * n + 20), at=at) for n, at in enumerate(times)]
        return run(found, replicas=2, routers=2)

    alone = 20 * BLOCK_TOKENS / PREFILL_RATE
    assert max(pairs(0.006).first_secs) < 1.2 * alone
    assert max(pairs(0.004).first_secs) > 1.8 * alone


def test_a_seed_gives_the_same_run_again() -> None:
    assert run().first_secs == undisturbed().first_secs
    assert run(routers=4, seed=2).first_secs != undisturbed().first_secs


def test_new_replicas_relieve_a_backlog() -> None:
    burst = [replace(each, at=each.at / 4) for each in SESSIONS]
    growing = {"replicas": 4, "grow_to": 12, "grow_at": 8.0}
    stays, moves = run(burst, recalls=False, **growing), run(burst, **growing)
    assert stays.moved == 0
    assert moves.moved > 0
    assert moves.mean < stays.mean


def others(*in_flight: int) -> Others:
    engines = [Engine(1) for _ in in_flight]
    for engine, count in zip(engines, in_flight, strict=True):
        push(engine, *(prompt(100 + number) for number in range(count)))
    return Others(engines, 1)


def test_the_rules_of_others_choose_as_theirs_do() -> None:
    fleet = others(2, 1, 3)
    assert [RULES["round-robin"](fleet, prompt(1)) for _ in range(4)] == [1, 2, 0, 1]
    assert RULES["fewest-requests"](fleet, prompt(1)) == 1
    assert RULES["fewest-tokens"](fleet, prompt(1)) == 1
    fleet.note(prompt(*range(10)), 2)
    assert RULES["ray-prefix"](fleet, prompt(0, 1, *range(20, 28))) == 2
    assert RULES["sglang"](fleet, prompt(0, 1, *range(20, 28))) != 2
    assert RULES["sglang"](fleet, prompt(*range(5), *range(20, 25))) == 2


def test_of_equal_prefixes_sglang_takes_the_first_replica_and_ray_the_emptiest() -> None:
    fleet = others(2, 1, 3)
    for replica in (0, 1, 2):
        fleet.note(prompt(7), replica)
    assert RULES["sglang"](fleet, prompt(7, 8)) == 0
    assert RULES["ray-prefix"](fleet, prompt(7, 8)) == 1


def test_a_fleet_out_of_balance_ignores_prefixes_by_the_rule_of_sglang() -> None:
    fleet = others(70, 2, 1)
    fleet.note(prompt(*range(10)), 0)
    assert RULES["sglang"](fleet, prompt(*range(10))) == 2
    assert RULES["ray-prefix"](fleet, prompt(*range(10))) == 0


def test_a_quantile_is_a_value() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile(list(map(float, range(1, 101))), 0.9) == 90.0


def test_the_command_prints_a_table_and_saves_figures_and_curves(tmp_path: Path) -> None:
    figures, curves = tmp_path / "figures.json", tmp_path / "curves.svg"
    rules = ("--policy", "cost", "--policy", "sglang")
    options = ("--requests", "60", "--replicas", "4", "--grow-to", "5", "--times", *rules)
    ended = subprocess.run(
        [sys.executable, "-m", "loadtests.routing", *options, "--save-to", figures, "--to", curves],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert "cost, loads 1 s old" in ended.stdout
    assert "1000 of 1000 replicas have a prefix" in ended.stdout
    (line,) = json.loads(figures.read_text())["lines"]
    sides = line["figures"]["first token, mean"]["sides"]
    assert {"cost", "cost, 4 routers", "cost, without recalls", "sglang"} <= sides.keys()
    means = {name: side["median"] for name, side in sides.items()}
    rows = {row.split("│")[1].strip(): row for row in ended.stdout.splitlines() if "│" in row}
    old = means["cost, loads 1 s old"] / means["cost"]
    assert f"{means['cost'] / means['sglang']:.2f} " in rows["sglang"]
    assert f"{old:.2f} │ 1.1, {'holds' if old <= 1.1 else 'fails'} " in rows["cost, loads 1 s old"]
    drawn = list(ET.parse(curves).iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(drawn) == len(sides)
