"""Structures are checked by a tiny engine of the real library."""

from typing import Any

import pytest
from sluice_llm.request import Refusal

from backends.openvino_genai.worker.sluice_openvino_genai.engine import import_library
from backends.openvino_genai.worker.sluice_openvino_genai.sampling import Structure
from backends.openvino_genai.worker.sluice_openvino_genai.structures import StructureCheck

pytest.importorskip("openvino_genai")


@pytest.fixture(scope="module")
def structures() -> Any:
    return StructureCheck(import_library())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("regex", r"\d{4}-\d{2}-\d{2}"),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", 'root ::= ""'),
        ("regex", "[^a]"),
    ],
)
def test_a_good_structure_passes(structures: StructureCheck, kind: str, text: str) -> None:
    structures.check(Structure(kind, text))


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
        ("json_schema", '{"$ref": "#"}', "json schema. is fitted by no text"),
        ("grammar", "root ::= root", "grammar. is fitted by no text"),
    ],
)
def test_a_wrong_structure_is_refused_and_the_next_is_checked(
    structures: StructureCheck, kind: str, text: str, error: str
) -> None:
    with pytest.raises(Refusal, match=error) as refused:
        structures.check(Structure(kind, text))
    assert ".cc" not in str(refused.value)
    structures.check(Structure("regex", f"{len(text)}a"))
