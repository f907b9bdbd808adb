"""Rules that no linter knows: sizes, names, and that every public word is documented."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from gateway.admission.admission import ADMISSION_METRICS
from gateway.backend import Backend, Instance
from gateway.errors import Code
from gateway.fleet.metrics import FLEET_METRICS
from gateway.models.gen_ai_metrics import FAMILIES as GEN_AI
from gateway.models.resident_readings import RESIDENT_METRICS
from gateway.observability.metrics import DOCUMENTED
from gateway.observability.remote_metrics import REMOTE_METRICS
from gateway.observability.tracer import DROPPED
from gateway.rollouts.readings import ROLLOUT_METRICS
from gateway.rollouts.shadow import SHADOW_METRICS
from gateway.schedulers.charges import TENANT_METRICS
from gateway.schedulers.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
INSTALLED = {".venv", "node_modules"}
EXAMPLE_TESTS = {"test_shout.py"}
"""The example of backends/README.md is a package with its own test."""
FOLDERS = ("gateway", "backends", "loadtests")
TEST_NAME = re.compile(r"\btest_\w+\.py\b")
LINE_LIMIT = 400
FORBIDDEN_MODULES = {"utils", "util", "common", "misc", "base", "helpers"}
FORBIDDEN_WORDS = re.compile(
    r"\bclass \w*(Manager|Handler|Helper|Processor)\b|class (?!Model)\w*Context\b"
)


def files(top: str, pattern: str) -> Iterator[Path]:
    """The files of a folder, without the environments and packages that tests install in it."""
    for path in (ROOT / top).rglob(pattern):
        if not INSTALLED.intersection(path.relative_to(ROOT).parts):
            yield path


def sources() -> list[Path]:
    """Every module of ours, without what is generated."""
    found = [*files("gateway", "*.py"), *files("backends", "*.py")]
    return sorted(path for path in found if "protos" not in path.parts)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*sources(), *sorted(files("loadtests", "*.py"))], ids=named)
def test_a_module_is_short_and_says_what_question_it_answers(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINE_LIMIT
    assert path.stem not in FORBIDDEN_MODULES
    assert not FORBIDDEN_WORDS.search(text)
    if path.name != "__init__.py":
        assert text.startswith('"""')


LONG_TESTS = {
    f"tests/conformance/test_{name}.py"
    for name in (
        "bad_input",
        "config_fields",
        "conversations",
        "ensembles",
        "generate",
        "http_infer",
        "infer",
        "lifecycle",
        "openai",
        "python_backend",
        "python_models",
        "repository",
        "sequences",
        "shared_memory",
    )
}
"""Each module of `tests/conformance` starts a server of its own; these are long to save servers."""


def test_modules_of_tests_are_short() -> None:
    long = {named(path) for path in files("tests", "*.py") if lines_of(path) > LINE_LIMIT}
    assert long == LONG_TESTS


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


INITS_WITH_CODE = {"gateway/__init__.py", "gateway/config/__init__.py"}
"""The version, and the path from which plug-in backends import `ModelConfig`."""


def test_an_init_has_a_docstring_at_most() -> None:
    inits = {path for path in sources() if path.name == "__init__.py"}
    trees = {named(path): ast.parse(path.read_text()).body for path in inits}
    with_code = {name for name, body in trees.items() if len(body) > is_docstring(body)}
    assert with_code == INITS_WITH_CODE


def is_docstring(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr)


def test_no_module_uses_global_state_or_type_checking_tricks() -> None:
    pattern = re.compile(r"^\s*global \w|TYPE_CHECKING", re.MULTILINE)
    assert [named(path) for path in sources() if pattern.search(path.read_text())] == []


def test_every_option_of_serve_is_documented() -> None:
    documented = (ROOT / "gateway/flags/README.md").read_text()
    usage = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", usage)) - {"--help"}
    assert options
    assert [option for option in sorted(options) if f"`{option}`" not in documented] == []


def test_every_metric_is_documented() -> None:
    documented = (ROOT / "gateway/observability/README.md").read_text()
    rollouts = ROLLOUT_METRICS | SHADOW_METRICS
    found = ADMISSION_METRICS | FLEET_METRICS | REMOTE_METRICS | RESIDENT_METRICS | TENANT_METRICS
    names = (*DOCUMENTED, *found, *rollouts, *GEN_AI, DROPPED)
    assert [name for name in names if f"`{name}`" not in documented] == []


def test_every_error_code_is_documented() -> None:
    documented = (ROOT / "gateway" / "README.md").read_text()
    assert [code.name for code in Code if f"`{code.name}`" not in documented] == []


Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """Every module of the repository, tests and load tests too."""
    found = [path for name in ("tests", "loadtests") for path in files(name, "*.py")]
    return sorted([*sources(), *found])


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes and all inside them, but for the functions that they define."""
    for node in nodes:
        yield node
        if not isinstance(node, (*get_args(Function), ast.Lambda)):
            yield from within(ast.iter_child_nodes(node))


def called(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names of what nodes call: `f` of `f()` and `self.f()`, `asyncio.f` of `asyncio.f()`."""
    for node in within(nodes):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name):
                yield {"self": "", "cls": ""}.get(owner.id, f"{owner.id}.") + node.func.attr


def clean_ups(tree: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """The statements that run in a task that may be cancelled already."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            yield node.finalbody
            yield from (each.body for each in node.handlers if is_for_cancelled(each))
        elif isinstance(node, ast.AsyncFunctionDef) and node.name == "__aexit__":
            yield node.body


def is_for_cancelled(handler: ast.ExceptHandler) -> bool:
    caught = "BaseException" if handler.type is None else ast.unparse(handler.type)
    return bool(re.search(r"\b(CancelledError|BaseException)\b", caught))


def timeouts_in_clean_ups(tree: ast.AST) -> set[str]:
    """The calls of `asyncio.timeout` in clean-ups, and in functions that clean-ups call here."""
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, Function)}
    open_names = {name for body in clean_ups(tree) for name in called(body)}
    reached: set[str] = set()
    while open_names:
        name = open_names.pop()
        reached.add(name)
        if name in functions:
            open_names |= set(called(functions[name].body)) - reached
    return reached & {"asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for"}


def raises_in_star(tree: ast.AST) -> list[int]:
    """The lines that raise inside `except*`."""
    handlers = [
        each for node in ast.walk(tree) if isinstance(node, ast.TryStar) for each in node.handlers
    ]
    return [node.lineno for node in within(handlers) if isinstance(node, ast.Raise)]


def trees(paths: Iterable[Path], text: str) -> dict[str, ast.AST]:
    """The modules in which a text stands, by name."""
    found = {named(path): path.read_text() for path in paths}
    return {name: ast.parse(code) for name, code in found.items() if text in code}


def test_nothing_is_raised_inside_except_star() -> None:
    """Before Python 3.11.4 it becomes a group."""
    found = {name: raises_in_star(tree) for name, tree in trees(python_files(), "except*").items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_clean_up_of_a_cancelled_task_has_a_timeout() -> None:
    """Before Python 3.11.3 one that expires there raises CancelledError."""
    found = {
        name: timeouts_in_clean_ups(tree) for name, tree in trees(sources(), "asyncio.").items()
    }
    assert {name: calls for name, calls in found.items() if calls} == {}


CLEAN_UPS = {
    "try: g()\nfinally: asyncio.timeout(1)": True,
    "try: g()\nexcept asyncio.CancelledError: asyncio.wait_for(g(), 1)": True,
    "async def __aexit__(self): self.b()\nasync def b(self): asyncio.timeout(1)": True,
    "asyncio.timeout(1)": False,
    "try: g()\nexcept ValueError: asyncio.wait_for(g(), 1)": False,
}


@pytest.mark.parametrize(("code", "is_found"), CLEAN_UPS.items())
def test_a_timeout_in_a_clean_up_is_found(code: str, is_found: bool) -> None:
    assert bool(timeouts_in_clean_ups(ast.parse(code))) == is_found


def test_a_raise_inside_except_star_is_found() -> None:
    code = "try: f()\nexcept* ValueError:\n if a:\n  raise KeyError\n def g(): raise KeyError"
    assert raises_in_star(ast.parse(code)) == [4]


SHARED_NAMES = {"ModelConfig", "Server", "Tensor"}
"""`Server` is the server, and the one that programs import; the others are model.py's API."""


def public_classes(paths: Iterable[Path]) -> dict[str, list[str]]:
    """The modules of every public class, by its name."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(named(path))
    return found


def test_no_two_public_classes_have_one_name() -> None:
    shared = {name: at for name, at in public_classes(sources()).items() if len(at) > 1}
    assert {name: at for name, at in shared.items() if name not in SHARED_NAMES} == {}


SEAMS = {Backend: 4, Instance: 4, Scheduler: 5}
"""The number of methods that others may have to implement in one class."""


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_has_few_methods(seam: type) -> None:
    methods = [name for name, found in vars(seam).items() if name[0] != "_" and callable(found)]
    assert 0 < len(methods) <= SEAMS[seam]


FORBIDDEN_PROSE = re.compile(
    r"\b(who|whom|whoever|whomever|nobody|somebody|anybody|everybody|whatever)\b"
    r"|\b(is|are|be|been|was|were) told\b|\btells? (of|it|them|how|what|which|that|whether|why)\b"
    r"|\bwhat may surprise\b|\bas ever\b|\b(go|goes|went|gone) on\b|\blives? on\b"
    r"|\b(come|comes|came) back\b|\b(be|is|are) had\b|\bso (many|much)\b|\bbeside\b|\bmends?\b"
    r"|\bplain (call|function|method|request)s?\b|\bwhat is left\b",
    re.IGNORECASE,
)
"""Words and forms that other servers do not use; gateway/README.md, "How this is written"."""

RIDDLE = re.compile(r"(What|Which|Who|How|Where|When|Why|Whatever|Whoever)\b")
"""The first word of a docstring that asks instead of stating."""
ASKING = re.compile(rf"""["']{RIDDLE.pattern}|\?(["'\\]|$)""", re.MULTILINE)
"""In the source of each docstring that asks."""

CODE = re.compile(r"```.*?```|`[^`\n]*`|\*[^*\n]+\*", re.DOTALL)


def docstrings(text: str) -> Iterator[str]:
    """Every string that stands alone as a statement: of modules, classes, functions, constants."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def texts(text: str) -> Iterator[str]:
    """Every other string with words: of log lines, errors, help texts and answers."""
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in alone and " " in str(node.value):
            yield str(node.value)


def comments(text: str) -> Iterator[str]:
    """The comments of a module; consecutive lines are one."""
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    yield " ".join(lines)


def prose_files() -> list[Path]:
    """Every module but this one, which holds the words."""
    return [path for path in python_files() if path != Path(__file__)]


def offences_of_prose() -> Iterator[str]:
    """The module or page and the text of each forbidden form; of tests not in their strings."""
    for path in prose_files():
        text = path.read_text()
        if not FORBIDDEN_PROSE.search(" ".join(text.replace("#", " ").split())):
            continue  # parsing takes ten times as long
        strings = () if path.is_relative_to(ROOT / "tests") else texts(text)
        for prose in (*docstrings(text), *comments(text), *strings):
            for found in FORBIDDEN_PROSE.finditer(CODE.sub("", " ".join(prose.split()))):
                yield f"{named(path)}: {found[0]}"
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    pages += [each for top in (*FOLDERS, "tests", "deploy") for each in sorted(files(top, "*.md"))]
    for path in pages:
        for found in FORBIDDEN_PROSE.finditer(CODE.sub("", path.read_text())):
            yield f"{named(path)}: {found[0]}"


def asking_docstrings() -> Iterator[str]:
    """The module and the first line of each docstring that asks."""
    for path in python_files():
        text = path.read_text()
        for docstring in docstrings(text) if ASKING.search(text) else ():
            first = docstring.partition("\n")[0]
            if first.endswith("?") or RIDDLE.match(first):
                yield f"{named(path)}: {first}"


NAME_OF_A_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def offences_of_names() -> Iterator[str]:
    """The module and the name of each test that has a forbidden form, with `_` as a space."""
    for path in prose_files():
        for name in NAME_OF_A_TEST.findall(path.read_text()):
            if FORBIDDEN_PROSE.search(name.replace("_", " ")):
                yield f"{named(path)}: {name}"


def test_prose_has_no_forbidden_words() -> None:
    assert list(offences_of_prose()) == []


def test_no_docstring_asks() -> None:
    assert list(asking_docstrings()) == []


def test_names_of_tests_have_no_forbidden_words() -> None:
    assert list(offences_of_names()) == []


def test_every_test_that_a_page_names_exists() -> None:
    existing = {path.name for path in files("tests", "test_*.py")}
    pages = [
        ROOT / "README.md",
        *(each for top in FOLDERS for each in files(top, "README.md")),
    ]
    named_tests = {
        (named(page), name) for page in pages for name in TEST_NAME.findall(page.read_text())
    }
    assert {each for each in named_tests if each[1] not in existing | EXAMPLE_TESTS} == set()
