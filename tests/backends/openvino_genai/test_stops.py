"""Stop strings in texts that arrive in pieces."""

import pytest

from backends.openvino_genai.worker.sluice_openvino_genai.stops import StopFinder


def read(finder: StopFinder, *pieces: str) -> tuple[list[str], str]:
    """The texts that can be sent, and the found string."""
    texts = []
    for number, piece in enumerate(pieces, 1):
        found = finder.read(piece, active=True, final=number == len(pieces))
        texts.append(found.text)
        if found.found:
            return texts, found.found
    return texts, ""


@pytest.mark.parametrize(
    ("stops", "pieces", "texts", "found"),
    [
        (["END"], ["a E", "N", "D b"], ["a ", "", ""], "END"),
        (["END"], ["a E", "x"], ["a ", "Ex"], ""),
        (["END"], ["a EN"], ["a EN"], ""),
        (["aab"], ["aa", "ab", "c"], ["", "a"], "aab"),
        (["later", "no"], ["x no later"], ["x "], "no"),
        ([], ["a", "b"], ["a", "b"], ""),
    ],
)
def test_text_that_may_begin_a_stop_string_waits_for_its_rest(
    stops: list[str], pieces: list[str], texts: list[str], found: str
) -> None:
    assert read(StopFinder(stops, include=False), *pieces) == (texts, found)


def test_a_found_string_can_stay_in_the_text() -> None:
    assert read(StopFinder(["END"], include=True), "a E", "ND b") == (["a ", "END"], "END")


def test_nothing_is_found_before_the_minimum_of_tokens() -> None:
    finder = StopFinder(["b"], include=False)
    assert finder.read("abc", active=False, final=False).text == "abc"
    assert finder.read("abc", active=True, final=False).found == "b"
