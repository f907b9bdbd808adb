"""Every field of a text is found on its line."""

import pytest

from gateway.tools.check import ScannedField, scan


def found(text: str) -> list[tuple[str, int]]:
    return [(".".join(each.names), each.line) for each in scan(text)]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", []),
        ("# name: 1", []),
        ('name: "m"\nbackend: "b"', [("name", 1), ("backend", 2)]),
        ('name: "m" # backend: "b"\nruntime: ""', [("name", 1), ("runtime", 2)]),
        ('name: "a # b"\nbackend: "}"', [("name", 1), ("backend", 2)]),
        ('name: \'a"b\'\nbackend: "c\\"{"', [("name", 1), ("backend", 2)]),
        ('name: "a"\n  "b"\nbackend: "c"', [("name", 1), ("backend", 3)]),
        ("a { b: 1 }", [("a", 1), ("a.b", 1)]),
        ("a: { b: 1 }", [("a", 1), ("a.b", 1)]),
        ("a <\n b < c: 1 >\n>\nd: 2", [("a", 1), ("a.b", 2), ("a.b.c", 2), ("d", 4)]),
        ("a [ { b: X },\n { b: Y } ]\nc: 1", [("a", 1), ("a.b", 1), ("a.b", 2), ("c", 3)]),
        ("a: [ X, Y,\n Z ]\nb: 1", [("a", 1), ("b", 3)]),
        ("a: [ ] b: -inf c: -1 d: 1e-5 e: true", [(each, 1) for each in "abcde"]),
        ("a: KIND_CPU, b: 1; c: 2", [("a", 1), ("b", 1), ("c", 1)]),
        ("a:\n\n1\r\nb: 2", [("a", 1), ("b", 4)]),
        ('a { b: "unfinished\n c: 1 }', [("a", 1), ("a.b", 1), ("a.c", 2)]),
        ("a { b: 1\n] c: 1 }", [("a", 1), ("a.b", 1)]),
        ("a: 1 } b: 2", [("a", 1)]),
        ("a { b { c", [("a", 1), ("a.b", 1), ("a.b.c", 1)]),
    ],
)
def test_a_field_is_found_on_the_line_of_its_name(text: str, fields: list[tuple[str, int]]) -> None:
    assert found(text) == fields


def test_messages_of_one_name_are_counted_however_they_are_written() -> None:
    text = "a { x: 1 } a [ { x: 2 }, { y { z: 3 } } ] b { x: 4 } a < x: 5 >"
    assert [
        (each.names[0], each.indices[0]) for each in scan(text) if each.names[-1] in {"x", "z"}
    ] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 3)]
    assert list(scan("a { b { } b { c: 1 } }"))[-1] == ScannedField(("a", "b", "c"), (0, 1, 0), 1)
