"""Rules of the sources that keep attacks from the server, which no test of behaviour can show."""

import ast
from collections.abc import Iterator

import pytest

from tests.serving import ROOT

SECRETS = ("digest", "secret")
"""Parts of the names of values that are compared in constant time."""

WALL_CLOCK = {
    "gateway/admission/deadlines.py": "a deadline that a client gives as a date",
    "gateway/conversations/history.py": "the start of a conversation, as other machines compare it",
    "gateway/fleet/router.py": "`created` of a model that replicas host",
    "gateway/flags/keys.py": "the expiry of a new key",
    "gateway/frontends/http/openai/embeddings.py": "`created` of a response",
    "gateway/models/loading.py": "a metric of the time of a load",
    "gateway/observability/traceparent.py": "the times of spans, and of exemplars",
    "gateway/observability/statistics.py": "`last_inference` of a model",
    "gateway/policy/api_keys.py": "the expiry of keys",
    "gateway/observability/access_log.py": "the time in a line of the access log",
    "gateway/policy/audit.py": "the time of a change",
    "gateway/policy/caller.py": "the expiry of callers",
    "gateway/policy/credentials.py": "the expiry of credentials",
    "gateway/policy/json_web_tokens.py": "the expiry of tokens",
    "gateway/rollouts/ledger.py": "the time of a transition",
    "gateway/rollouts/golden_recorder.py": "the date of a golden request",
    "gateway/storage/mirror/mirror.py": "the age of objects, if a listing has no time of its own",
    "gateway/tools/keys.py": "the expiry of listed keys",
    "backends/python/worker/sluice_llm/responses.py": "`created` of a response",
    "backends/vllm/start_reports.py": "the start of a process, a date of the system",
}
"""The modules that ask for the time of day, and the dates that they need; durations do not."""

UNPICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def modules(*tops: str) -> Iterator[tuple[str, ast.AST]]:
    """The sources below some folders, by name."""
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def compared(tree: ast.AST) -> Iterator[str]:
    """The names in comparisons."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for each in ast.walk(node):
                if isinstance(each, ast.Name | ast.Attribute):
                    yield each.id if isinstance(each, ast.Name) else each.attr


LOOKS = {"time": ("time", "time_ns"), "datetime": ("now", "utcnow", "today")}
"""The functions that ask for the time of day, by their module or class."""


def asks_the_wall_clock(tree: ast.AST) -> bool:
    return any(is_a_look(node) for node in ast.walk(tree))


def is_a_look(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(each.name in LOOKS["time"] for each in node.names)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr in LOOKS.get(node.value.id, ())
    return False


def test_a_secret_is_compared_in_constant_time_only() -> None:
    found = {
        name: [each for each in compared(tree) if any(word in each for word in SECRETS)]
        for name, tree in modules("gateway/policy")
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_durations_do_not_depend_on_the_time_of_day() -> None:
    """A clock that jumps then changes dates only."""
    found = {name for name, tree in modules("gateway", "backends") if asks_the_wall_clock(tree)}
    assert found == WALL_CLOCK.keys()


def test_engines_never_unpickle_messages() -> None:
    texts = [path for path in (ROOT / "backends").rglob("*") if path.suffix in (".py", ".md")]
    assert [path.name for path in texts if UNPICKLES in path.read_text()] == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("if digest == given: pass", ["digest"]),
        ("found = a.secret != b", ["secret"]),
        ("compare_digest(digest, given)", []),
    ],
)
def test_a_comparison_of_a_secret_is_found(code: str, names: list[str]) -> None:
    found = [each for each in compared(ast.parse(code)) if each in SECRETS]
    assert found == names


@pytest.mark.parametrize(
    "code", ["time.time()", "f(time.time_ns)", "datetime.now(UTC)", "from time import sleep, time"]
)
def test_a_look_at_the_wall_clock_is_found(code: str) -> None:
    assert asks_the_wall_clock(ast.parse(code))


@pytest.mark.parametrize("code", ["time.monotonic()", "loop.time()", "from time import sleep"])
def test_another_clock_is_no_look_at_the_wall_clock(code: str) -> None:
    assert not asks_the_wall_clock(ast.parse(code))
