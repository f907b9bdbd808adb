"""A server with models of every kind, and a real browser that looks at its page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    expect,
    sync_playwright,
)

from tests import needs
from tests.conformance.models import EVERY_VERSION, identity
from tests.serving import ROOT, WAIT_SECS, Serving, serving, write_model

MODELS = Path(__file__).parent / "models"
ADD_SUB = ROOT / "tests" / "conformance" / "python_models" / "add_sub"
OPENAI = ROOT / "model_repository" / "openai_python"
ARTEFACTS = ROOT / "artefacts" / "playground"
SHELL = "chromium-headless-shell"
BROWSERS = (SHELL, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ODD_NAME = "odd näme & 100%?#<b>"
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
SIZE = {"width": 1280, "height": 860}
REFUSED = "the server responded with a status of"
OPTIONAL = """backend: "identity"
input [
  { name: "A" data_type: TYPE_INT64 dims: [2] },
  { name: "B" data_type: TYPE_BOOL dims: [-1] optional: true }
]
output [
  { name: "X" data_type: TYPE_INT64 dims: [2] },
  { name: "Y" data_type: TYPE_BOOL dims: [-1] }
]
"""
CATALOGUE = {
    "batched": identity("FP32", "16") + "max_batch_size: 8\n",
    "broken": identity("FP32", load_fails="no such weights"),
    "failing": identity("BYTES", "1", fail="the model says no"),
    "matrix": identity("FP32", "-1, -1"),
    "optional": OPTIONAL,
    "repeat": 'backend: "repeat"\n',
    "slow": identity("BYTES", "1", delay_us=400_000),
    "texts": identity("BYTES"),
    ODD_NAME: identity("INT32", "2"),
}


in_each_look = pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        *(
            pytest.param(*each, marks=pytest.mark.release)
            for each in ((1280, "dark"), (390, "light"))
        ),
    ],
)
"""The pictures of a view: wide and narrow, light and dark."""


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model, and tensor models by what their form has to cope with."""
    folder = tmp_path_factory.mktemp("playground") / "models"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(MODELS, folder, ignore=ignored)
    for model in (ADD_SUB, OPENAI):
        shutil.copytree(model, folder / model.name, ignore=ignored)
    for name, config in CATALOGUE.items():
        write_model(folder, name, config)
    write_model(folder, "versioned", identity("FP32") + EVERY_VERSION, versions=(1, 3))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    """A server that loads and unloads by request."""
    with serving(repository, *EXPLICIT, "--exit-on-error=false") as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    assert "unexpected" not in started.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window, in which a test waits for what it expects as for all else."""
    expect.set_options(timeout=1000 * WAIT_SECS)
    found = needs.program(*BROWSERS, package=SHELL)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, and containers run tests as root.
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Person:
    """A person before a page; every complaint of the browser is kept."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_SECS * 1000)
        page.on("pageerror", self._catch)
        page.on("console", self._hear)

    def look_at(self, view: str) -> "Person":
        """Go to one of the views; the page has heard of the server's models when this returns."""
        self.page.goto(f"{self.url}/#{view}")
        self.page.locator(".server.ready, .server.unready").wait_for()
        return self

    def picture(self, name: str) -> None:
        """Keep what is seen now, for people to look at."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")

    def turn_away(self) -> None:
        """Leave the page, which is then as a new one."""
        self.page.unroute_all()
        self.page.goto("about:blank")
        self.page.remove_listener("pageerror", self._catch)
        self.page.remove_listener("console", self._hear)

    def _catch(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _hear(self, line: ConsoleMessage) -> None:
        # What the server refuses is shown by the page; the browser's own line on it is no fault.
        if line.type in ("error", "warning") and REFUSED not in line.text:
            self.complaints.append(line.text)


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """A wide window, in light; the page keeps nothing, so that one does for many tests."""
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    yield context
    context.close()


@contextmanager
def before(page: Page, server: Serving) -> Iterator[Person]:
    """A person before this page, which has made no mistake when the block ends."""
    found = Person(page, server.http)
    yield found
    found.turn_away()
    assert found.complaints == []


@pytest.fixture
def person(window: BrowserContext, server: Serving) -> Iterator[Person]:
    """A person before the page of the window: a page costs half a second, and forgets at a goto."""
    with before(window.pages[0] if window.pages else window.new_page(), server) as found:
        yield found
