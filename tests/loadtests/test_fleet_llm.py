"""The part of `fleet` with a real model: its skip, and the words for its figures."""

from pathlib import Path

import pytest

from loadtests import fleet_llm
from loadtests.support.generation import TEXT, Load, line_of
from loadtests.support.results import Results
from loadtests.support.servers import GATEWAY


def test_without_the_model_the_part_is_skipped_with_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet_llm, "find_spec", lambda name: name)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    assert "sluice fetch smollm2-135m-instruct" in fleet_llm.lacking()
    stored = tmp_path / "models" / "smollm2-135m-instruct"
    stored.mkdir(parents=True)
    (stored / "config.json").touch()
    assert fleet_llm.lacking() == ""


def test_without_its_engine_the_part_is_skipped_by_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_llm, "find_spec", lambda name: None)
    assert fleet_llm.lacking() == "vllm is not installed"


def test_the_ratio_is_that_of_the_router_to_the_server_in_the_same_round() -> None:
    load = Load(fleet_llm.STREAMS, 1, 64)
    results = Results()
    for alone, routed in ((100.0, 98.0), (200.0, 190.0), (50.0, 50.0)):
        results.add(GATEWAY, {line_of(TEXT, load).rate: alone})
        results.add(fleet_llm.ROUTER, {line_of(TEXT, load).rate: routed})
    assert fleet_llm.describe(results) == (
        "llama, text, 32 streams: one server 100.0 token/s, through a router 98.0, ratio 0.98"
    )
