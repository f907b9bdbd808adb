"""A person gives the page an API key, which stays in the tab; parts need one of its roles."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, Request, expect

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import bearer, stored, write
from tests.gateway.frontends.http.playground.conftest import EXPLICIT, SIZE, Person, before
from tests.serving import Serving, serving, wait_until

pytestmark = pytest.mark.browser

KEYS = {role: new_key() for role in Role}
PARTS = {role: stored(made, roles=frozenset({role})) for role, made in KEYS.items()}
STORED = "[{...localStorage}, {...sessionStorage}]"
OF_THE_PAGE = re.compile(r"/(playground/[a-z_]+\.(js|css|svg))?(#[a-z]+)?$")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, *PARTS.values())
    return file


@pytest.fixture(scope="module")
def server(repository: Path, key_file: Path) -> Iterator[Serving]:
    """A server with keys; each has one role."""
    flags = (*EXPLICIT, "--exit-on-error=false", f"--api-keys={key_file}")
    with serving(repository, *flags) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    assert not any(key[20:] in started.text for key, _, _ in KEYS.values())


@pytest.fixture
def person(window: BrowserContext, server: Serving) -> Iterator[Person]:
    """A person with a tab of their own, which keeps the key."""
    page = window.new_page()
    with before(page, server) as found:
        yield found
    page.close()


def give(person: Person, key: str) -> None:
    """Type a key and press Enter."""
    expect(person.page.locator("#key")).to_be_focused()
    person.page.keyboard.type(key)
    person.page.keyboard.press("Enter")


def test_a_key_is_asked_for_once_and_sent_with_each_request(person: Person) -> None:
    page, key, requests = person.page, KEYS[Role.INFER][0], list[Request]()
    person.look_at("chat")
    give(person, "sk-sluice-wrong")
    expect(page.locator("#key-failure")).to_have_text("the API key is not valid")
    expect(page.locator("nav, #view-chat, #forget").locator("visible=true")).to_have_count(0)
    person.picture("key-wrong")
    page.set_viewport_size({**SIZE, "width": 390})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size(SIZE)
    assert page.evaluate(STORED) == [{}, {}]

    page.on("request", lambda request: requests.append(request))
    give(person, key)
    page.select_option("#chat-model", label="storyteller")
    page.fill("#question", "a story")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_contain_text("none had to wait.")
    page.reload()
    page.click("nav a[href='#tensors']")
    page.select_option("#tensor-model", label="texts")
    page.fill("#input-0", "hi")
    page.click("#infer")
    expect(page.locator("#outputs pre")).to_have_text("hi")
    expect(page.locator("#curl")).to_contain_text('"Authorization: Bearer $SLUICE_API_KEY"')

    asked = [each for each in requests if not OF_THE_PAGE.search(each.url)]
    paths = {each.url.rpartition("/")[2] for each in asked}
    assert paths >= {"models", "storyteller", "generate_stream", "texts", "infer"}
    assert {each.headers.get("authorization") for each in asked} == {f"Bearer {key}"}
    assert not [each.url for each in requests if key in each.url]
    assert page.evaluate(STORED) == [{}, {"sluice.key": key}]
    assert key not in page.url + page.content()

    page.click("#forget")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#key-failure")).to_be_hidden()
    assert page.evaluate(STORED) == [{}, {}]


def test_parts_that_need_another_role_say_so(person: Person) -> None:
    page = person.look_at("state").page
    give(person, KEYS[Role.INFER][0])
    closed, rows = page.locator(".closed >> visible=true"), page.locator("#models tbody tr")
    expect(closed).to_have_text("This part needs a key with the role observe or admin.")
    expect(rows.locator("visible=true")).to_have_count(0)
    person.picture("key-infer-state")
    page.click("#forget")
    give(person, KEYS[Role.OBSERVE][0])
    expect(rows.filter(has_text="add_sub").locator(".badge")).to_have_text("Ready")
    expect(page.get_by_role("button", name=re.compile("^(Unl|L)oad"))).to_have_count(0)
    expect(closed).to_have_count(0)
    for view in ("chat", "tensors"):
        page.click(f"nav a[href='#{view}']")
        expect(closed).to_have_text("This part needs a key with the role infer.")
        expect(page.locator("main :is(select, textarea, input) >> visible=true")).to_have_count(0)
        person.picture(f"key-observe-{view}")
    expect(page.locator("#banner")).to_be_hidden()


def is_known(url: str, role: Role) -> bool:
    """Whether the server knows the key of a role that may read statistics."""
    return httpx.get(f"{url}/v2/models/stats", headers=bearer(KEYS[role][0])).is_success


def test_a_key_that_is_revoked_is_asked_for_again(person: Person, key_file: Path) -> None:
    page = person.look_at("state").page
    give(person, KEYS[Role.OBSERVE][0])
    expect(page.locator("#models tbody tr").first).to_be_visible()
    write(key_file, PARTS[Role.INFER], PARTS[Role.ADMIN])
    try:
        refused = page.locator("#key-failure")
        expect(refused).to_have_text("the API key is not valid")
        give(person, KEYS[Role.ADMIN][0])
        unload = page.get_by_role("button", name="Unload matrix")
        unload.click()
        expect(page.locator("#operation")).to_have_text("matrix is being unloaded.")
    finally:
        write(key_file, *PARTS.values())
        wait_until(lambda: is_known(person.url, Role.OBSERVE), "the key is valid again")
