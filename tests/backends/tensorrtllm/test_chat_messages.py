"""Messages as chat templates get them."""

from typing import Any

import pytest
from sluice_llm.chat import readable
from sluice_llm.request import Mistake


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]


def test_texts_are_joined_and_messages_left_as_they_were() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    assert readable([message]) == [{"role": "user", "content": "a\nb"}]
    assert isinstance(message["content"], list)
    assert readable([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]


def test_arguments_of_tool_calls_are_parsed() -> None:
    (message,) = readable(called('{"x": 1}'))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (["a"], 'message 0 is "a", expected an object'),
        ([{"content": [{"type": "text"}]}], "only parts of the type text"),
        ([{"content": [{"type": "image_url", "text": "a"}]}], "only parts of the type text"),
        (called("{"), "message 0 has a tool call whose arguments are not valid JSON: Expecting"),
        (called("[" * 5000), "whose arguments are not valid JSON: it is nested too deeply"),
    ],
)
def test_parts_that_are_no_text_are_refused(messages: list[Any], text: str) -> None:
    with pytest.raises(Mistake) as refusal:
        readable(messages)
    assert text in str(refusal.value)
