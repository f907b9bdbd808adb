"""Structures are checked by a tiny engine of the real library, in a process of its own."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.sampling import Structure
from backends.openvino_genai.worker.sluice_openvino_genai.structures import StructureCheck

pytest.importorskip("openvino_genai")


@pytest.fixture(scope="module")
def structures() -> Iterator[StructureCheck]:
    found = StructureCheck()
    yield found
    found.close()


def check(structures: StructureCheck, kind: str, text: str) -> None:
    asyncio.run(structures.check(Structure(kind, text)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("regex", r"\d{4}-\d{2}-\d{2}"),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", 'root ::= ""'),
        ("regex", "[^a]"),
        ("grammar", 'root ::= "(((((" "a" # (((('),
        ("json_schema", '{"type": "string", "maxLength": 2000}'),
    ],
)
def test_a_good_structure_passes(structures: StructureCheck, kind: str, text: str) -> None:
    check(structures, kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("json_schema", '{"type": "obj', "Failed to parse JSON"),
        ("json_schema", '{"$ref": "#/definitions/x"}', "Cannot find field definitions"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}', "minimum greater"),
        ("regex", "[z-a]", "lower bound is larger"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("grammar", "nonsense", "EBNF"),
        ("regex", "a" * 70_000, "has 70000 characters"),
        ("regex", "(" * 70 + ")" * 70, "has 70 nested brackets"),
        ("json_schema", '{"pattern": "(a{200}){200}"}', "about 40000 states"),
        (
            "json_schema",
            '{"type": "string", "maxLength": 3000}',
            "about 3000 states that admit many",
        ),
        ("json_schema", '{"const": 1e400}', "is refused"),
        ("regex", "a\ud800", "is refused"),
        ("grammar", 'root ::= ("ab"{200}){200}', "about 40004 states"),
        ("grammar", f'root ::= "{")" * 20_000}" | {"(" * 20_000}"a"', "20000 nested brackets"),
        ("grammar", f"# {')' * 20_000}\nroot ::= {'(' * 20_000}", "20000 nested brackets"),
        ("json_schema", f'{{"const": "{"}" * 100_0}", "items": {"[" * 100_0}', "nested brackets"),
        ("json_schema", '{"$ref": "#"}', "json schema. is fitted by no text"),
        ("grammar", "root ::= root", "grammar. is fitted by no text"),
    ],
)
def test_a_wrong_structure_is_refused_and_the_next_is_checked(
    structures: StructureCheck, kind: str, text: str, error: str
) -> None:
    with pytest.raises(Mistake, match=error) as refused:
        check(structures, kind, text)
    assert ".cc" not in str(refused.value)
    check(structures, "regex", f"{len(text)}a")


def test_a_structure_that_stops_the_library_ends_its_process_only(
    structures: StructureCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("triton_python_backend_utils.Logger.log_warn", logged.append)
    endless = "root ::= " + " ".join(['("a" "b"?)?'] * 3000)
    for _ in range(2):
        with pytest.raises(Mistake, match="takes too long to compile, or too much memory"):
            check(structures, "grammar", endless)
    assert logged == ["structure check ended kind=grammar"], "a refusal is remembered"
    check(structures, "regex", "after it")


def test_a_process_that_was_killed_is_started_again(structures: StructureCheck) -> None:
    check(structures, "regex", "before it")
    running = ["pgrep", "-P", str(os.getpid()), "-f", "sluice_openvino_genai.compiling"]
    process = int(subprocess.check_output(running))
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    check(structures, "regex", "after the kill")
