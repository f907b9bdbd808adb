"""The view of the server's state, with loads and unloads where they are allowed."""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Route, expect

from tests.conformance.models import identity
from tests.gateway.frontends.http.playground.conftest import ODD_NAME, SIZE, Person, in_each_look
from tests.serving import Serving, serving, write_model

pytestmark = pytest.mark.browser

GIB = 2**30
SECONDS = 125
"""More than the plots show."""


@pytest.fixture
def state(person: Person) -> Person:
    """A person before the state of the server."""
    return person.look_at("state")


@pytest.fixture
def fixed(tmp_path: Path) -> Iterator[Serving]:
    """A server whose models are loaded at the start and never again."""
    write_model(tmp_path, "only", identity("FP32"))
    with serving(tmp_path) as started:
        yield started


def row(person: Person, model: str) -> Locator:
    """The row of a model."""
    name = person.page.get_by_text(model, exact=True)
    return person.page.locator("#models tbody tr").filter(has=name).first


def test_each_model_is_ready_or_says_why_not(state: Person) -> None:
    expect(row(state, "add_sub").locator(".badge")).to_have_text("Ready")
    expect(row(state, "broken").locator(".badge")).to_have_text("Not ready")
    expect(row(state, "broken").locator(".reason")).to_contain_text("no such weights")
    expect(row(state, ODD_NAME).locator(".badge")).to_have_text("Ready")
    versions = state.page.locator("#models tbody tr").filter(has_text="versioned")
    expect(versions.locator("th .tag")).to_have_text(["version 1", "version 3"])
    expect(versions.locator("button:visible")).to_have_count(1)
    expect(state.page.locator("#server .words")).to_have_text(re.compile(r"· not ready$"))


def test_requests_show_in_flight_in_the_queue_and_as_rates(state: Person, server: Serving) -> None:
    slow = row(state, "slow")
    expect(slow.locator("[data-label='In flight']")).to_have_text("0")
    script = """async () => {
      const body = JSON.stringify({inputs: [
        {name: "INPUT", shape: [1], datatype: "BYTES", data: ["x"]}]});
      const ask = async () => {
        while (!window.enough) await fetch("v2/models/slow/infer", {method: "POST", body});
      };
      await Promise.all(Array.from({length: 4}, ask));
    }"""
    state.page.evaluate(f"window.asked = ({script})(); undefined")
    expect(slow.locator("[data-label='In flight']")).not_to_have_text("0")
    expect(slow.locator("[data-label='Queue']")).not_to_have_text("0")
    requests = slow.locator("[data-label='Requests per second']")
    expect(requests.locator(".amount")).to_have_text(re.compile(r"^(?!0$)[\d.]+$"))
    expect(requests.locator("svg")).to_have_attribute("aria-label", re.compile(r"^now [\d.]+$"))
    expect(requests.locator(".line")).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+L"))
    latency = slow.locator("[data-label='Latency, mean']")
    expect(latency.locator(".amount")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(latency.locator(".note")).to_have_text(re.compile(r"^[\d.]+ m?s in the queue$"))
    slow.scroll_into_view_if_needed()
    state.picture("state-requests")
    state.page.evaluate("window.enough = true; window.asked")
    expect(slow.locator("[data-label='In flight']")).to_have_text("0")


def test_two_minutes_of_a_busy_server_with_a_gpu_and_an_engine_are_plotted(
    browser: Browser, server: Serving
) -> None:
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    state = Person(context.new_page(), server.http)
    told = itertools.count()
    state.page.clock.install(time=0)
    state.page.route(
        "**/playground/state", lambda route: route.fulfill(json=busy_server(next(told)))
    )
    state.page.clock.pause_at(60)
    state.look_at("state")
    llama = row(state, "llama")
    in_flight = llama.locator("[data-label='In flight']")
    for second in range(1, SECONDS):
        state.page.clock.run_for(1000)
        expect(in_flight).to_have_text(str(second))
    rate, latency, tokens = (llama.locator(".figure").nth(index) for index in range(3))
    expect(rate.locator(".amount")).to_have_text("2")
    expect(latency.locator(".amount")).to_have_text("150 ms")
    expect(latency.locator(".note")).to_have_text("25 ms in the queue")
    expect(tokens.locator(".note")).to_have_text("first after 60 ms")
    expect(llama.locator("[data-label='Queue']")).to_have_text("5")
    points = (tokens.locator(".line").get_attribute("d") or "").split("L")
    # The oldest second may lie a rounding error beyond the two minutes.
    assert len(points) in (119, 120)
    assert float(points[0].removeprefix("M").split()[0]) <= 2
    expect(state.page.locator("#machine .tile-name")).to_have_text(
        ["CPU", "Memory", "GPU 0", "GPU 0 memory", "KV cache of llama"]
    )
    expect(state.page.locator("#machine .amount").nth(3)).to_have_text("60 of 80 GiB")
    state.picture("state-busy-light")
    state.page.emulate_media(color_scheme="dark")
    state.picture("state-busy-dark")
    context.close()
    assert state.complaints == []


def busy_server(second: int) -> dict[str, Any]:
    """The state of a server of an engine and an encoder in its n-th second."""
    wave = (1 + math.sin(second / 9)) / 2
    done = 2 * second
    totals = {"failed": 0, "inferences": done, "executions": done, "succeeded": done}
    times = {"request_ns": done * 150e6, "queue_ns": done * 25e6, "compute_ns": done * 125e6}
    tokens = {
        "completion_tokens": int(900 * second + 4000 * math.sin(second / 9)),
        "first_tokens": done,
        "first_token_secs": done * 0.06,
    }
    engine = {"running": 8, "waiting": 4, "kv_cache": 0.3 + 0.4 * wave}
    ready = {"version": "1", "state": "READY", "reason": "", "decoupled": True, "queued": 1}
    llama = {"name": "llama", "kind": "chat", "door": "generate", "engine": engine}
    llama["in_flight"] = second
    idle = dict.fromkeys((*totals, *times, *tokens, "in_flight"), 0)
    encoder = {"name": "minilm", "kind": "tensor", **idle, "engine": {}}
    lost = {"name": "resnet", "version": "2", "state": "UNAVAILABLE", "reason": "no such file"}
    gpu = {"id": "GPU-0", "use": 0.9 * wave, "memory_used": 60 * GIB, "memory_total": 80 * GIB}
    memory = {"memory_used": 9 * GIB, "memory_total": 32 * GIB}
    return {
        "server": {"name": "triton", "version": "1.0", "ready": True, "explicit": True},
        "models": [{**ready, **totals, **times, **tokens, **llama}, {**ready, **encoder}, lost],
        "machine": {"cpu": 0.2 + 0.3 * wave, **memory, "gpus": [gpu]},
        "rollouts": [],
    }


REPLICA = {
    "name": "llama",
    "version": "3",
    "trouble": "",
    "refused": "",
    "in_flight": 12,
    "open_conversations": 31,
    "open_sequences": 0,
    "expected_wait_secs": 0.25,
}
FLEET: dict[str, Any] = {
    "fleet": "sluice",
    "role": "router",
    "replicas": [
        {"address": "gpu1:8003", "state": "READY", "reason": "", "models": [REPLICA]},
        {"address": "gpu2:8003", "state": "LOST", "reason": "it does not answer", "models": []},
        {
            "address": "gpu3:8003",
            "state": "DRAINING",
            "reason": "",
            "models": [
                {
                    **REPLICA,
                    "in_flight": 0,
                    "refused": "another configuration",
                    "open_conversations": 0,
                    "open_sequences": 1,
                }
            ],
        },
    ],
    "models": [
        {"name": "llama", "version": "3", "ready": 1},
        {
            "name": "idle",
            "version": "1",
            "ready": 0,
            "waiting": 4,
            "expected_start_secs": 40.0,
            "reason": "no node has 8 GPU",
        },
    ],
}


def test_a_router_shows_its_replicas_and_another_server_none(person: Person) -> None:
    shown: dict[str, Any] = {"fleet": None}

    def answer(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), **shown})

    person.page.route("**/playground/state", answer)
    person.look_at("state")
    table = person.page.locator("#replicas")
    expect(row(person, "add_sub")).to_be_visible()
    expect(table).to_be_hidden()
    shown["fleet"] = FLEET
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(4)
    addresses = [each["address"] for each in FLEET["replicas"]]
    expect(rows.locator("th")).to_have_text([*addresses, "none"])
    expect(rows.locator(".badge")).to_have_text(
        ["Ready", "Not connected", "Draining", "No replica"]
    )
    expect(rows.locator(".reason")).to_have_text(
        ["it does not answer", "another configuration", "no node has 8 GPU"]
    )
    expect(rows.locator("[data-label='Model']")).to_have_text(
        ["llama version 3", "", "llama version 3", "idle version 1"]
    )
    expect(rows.locator("[data-label='In flight']")).to_have_text(["12", "", "0", "4"])
    pinned = ["31 conversations", "", "1 sequence", ""]
    expect(rows.locator("[data-label='Pinned']")).to_have_text(pinned)
    waits = ["250 ms", "", "250 ms", re.compile(r"^40\D")]
    expect(rows.locator("[data-label='Expected wait']")).to_have_text(waits)
    table.scroll_into_view_if_needed()
    person.picture("state-fleet")


ROLLOUT: dict[str, Any] = {
    "model": "llama",
    "stable": 3,
    "candidate": 4,
    "state": "step",
    "reason": "step 1 is passed",
    "weight": 50.0,
    "shadow": 0.0,
    "step": 2,
    "steps": [{}, {}, {}],
    "spent_secs": 61.2,
    "for_secs": 600.0,
    "requests": 17,
    "min_requests": 200,
    "guardrails": [
        {"guardrail": "slow", "evidence": 0.0, "limit": 2.3},
        {"guardrail": "errors", "evidence": 1.25, "limit": 2.3},
    ],
}


def test_a_server_shows_its_rollouts(person: Person) -> None:
    shown: dict[str, Any] = {}

    def answer(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), **shown})

    person.page.route("**/playground/state", answer)
    person.look_at("state")
    expect(row(person, "add_sub")).to_be_visible()
    expect(person.page.locator("#rollouts")).to_be_hidden()
    shown["rollouts"] = [ROLLOUT, {**ROLLOUT, "state": "rolled_back", "shadow": 10.0}]
    rows = person.page.locator("#rollout-rows tbody tr")
    expect(rows.locator(".badge")).to_have_text(["Step", "Rolled back"])
    expect(rows.nth(0).locator("th")).to_have_text("llama 3 → 4")
    expect(rows.locator("[data-label='Weight']")).to_have_text(["50 %", "shadow 10 %"])
    words = ["2 of 3", "1:01 of 10:00", "17 of 200", "errors 1.3 of 2.3"]
    expect(rows.nth(0).locator("td.number")).to_have_text(["50 %", *words])
    rows.nth(0).scroll_into_view_if_needed()
    person.picture("state-rollouts")


def test_the_machine_shows_its_processors_and_memory(state: Person) -> None:
    tiles = state.page.locator("#machine .tile")
    expect(tiles.locator(".tile-name")).to_have_text(["CPU", "Memory"])
    expect(tiles.nth(0).locator(".amount")).to_have_text(re.compile(r"^\d+ %$"))
    expect(tiles.nth(1).locator(".amount")).to_have_text(re.compile(r"^[\d.]+ of [\d.]+ GiB$"))


def test_a_model_is_unloaded_and_loaded_again(state: Person) -> None:
    matrix = row(state, "matrix")
    matrix.get_by_role("button", name="Unload matrix").click()
    expect(matrix.locator(".badge")).to_have_text("Unloaded")
    expect(state.page.locator("#operation")).to_have_text("matrix is being unloaded.")
    matrix.get_by_role("button", name="Load matrix").focus()
    state.page.keyboard.press("Enter")
    expect(matrix.locator(".badge")).to_have_text("Ready")
    expect(state.page.locator("#operation")).to_have_text("matrix is loaded.")
    expect(matrix.get_by_role("button", name="Unload matrix")).to_be_focused()


def test_a_model_with_an_odd_name_is_unloaded_and_loaded_under_its_own_name(state: Person) -> None:
    odd = row(state, ODD_NAME)
    odd.get_by_role("button").click()
    expect(odd.locator(".badge")).to_have_text("Unloaded")
    odd.get_by_role("button").click()
    expect(odd.locator(".badge")).to_have_text("Ready")


def test_a_load_that_fails_says_why(state: Person) -> None:
    row(state, "broken").get_by_role("button", name="Load broken").click()
    expect(state.page.locator("#operation.failure")).to_contain_text("no such weights")
    expect(row(state, "broken").get_by_role("button")).to_have_text("Load")


def test_models_cannot_be_loaded_by_hand_where_the_server_refuses_that(
    browser: Browser, fixed: Serving
) -> None:
    context = browser.new_context(viewport=SIZE)
    state = Person(context.new_page(), fixed.http).look_at("state")
    expect(row(state, "only").locator(".badge")).to_have_text("Ready")
    expect(state.page.locator("#server .words")).to_have_text(re.compile(r"· ready$"))
    expect(state.page.locator("#models button")).to_be_hidden()
    expect(state.page.locator("#operations")).to_be_hidden()
    context.close()
    assert state.complaints == []


def test_a_page_without_a_hash_shows_what_the_server_can_do(
    browser: Browser, fixed: Serving
) -> None:
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.goto(fixed.http)
    expect(page.locator("#view-tensors")).to_be_visible()
    page.goto(f"{fixed.http}/#chat")
    expect(page.locator("#chat-model")).to_have_text("No chat model is loaded")
    expect(page.locator("#send")).to_be_disabled()
    context.close()


def test_a_lost_server_is_shown_and_found_again(browser: Browser, fixed: Serving) -> None:
    context = browser.new_context(viewport=SIZE)
    state = Person(context.new_page(), fixed.http).look_at("state")
    state.page.route("**/playground/state", lambda route: route.abort())
    banner = state.page.locator("#banner")
    expect(banner).to_have_text("The server cannot be reached. It is asked again every second.")
    expect(state.page.locator("#server .words")).to_have_text("No answer")
    state.picture("state-lost")
    state.page.unroute("**/playground/state")
    expect(banner).to_be_hidden()
    expect(state.page.locator("#server .words")).to_have_text(re.compile("ready$"))
    context.close()


def test_a_hidden_page_requests_no_state(browser: Browser, server: Serving) -> None:
    context = browser.new_context(viewport=SIZE)
    state = Person(context.new_page(), server.http)
    state.page.clock.install()
    state.look_at("state")
    with state.page.expect_response("**/playground/state"):
        state.page.clock.run_for(1000)
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    state.page.evaluate(hide, True)
    asked: list[str] = []
    state.page.on("request", lambda request: asked.append(request.url))
    for _ in range(10):
        state.page.clock.run_for(1000)
        state.page.evaluate("fetch('playground/icon.svg').then((found) => found.text())")
    assert {url.rpartition("/")[2] for url in asked} == {"icon.svg"}
    with state.page.expect_response("**/playground/state"):
        state.page.evaluate(hide, False)
    context.close()


@in_each_look
def test_the_state_fits_in_light_and_dark_wide_and_narrow(
    browser: Browser, server: Serving, scheme: str, width: int
) -> None:
    size = {**SIZE, "width": width}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    state = Person(context.new_page(), server.http).look_at("state")
    expect(
        row(state, "add_sub").locator("[data-label='Requests per second'] .amount")
    ).to_have_text(re.compile(r"^[\d.]+$"))
    assert state.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    state.picture(f"state-{scheme}-{width}")
    context.close()
    assert state.complaints == []
