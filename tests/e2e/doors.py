"""The doors for streams of text of the real engine: how each is asked, and its text read."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.llama import streamed

TALE = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Door:
    """One endpoint of HTTP; `prompt` is the member of its body for the text to continue."""

    path: str
    prompt: str

    def __str__(self) -> str:
        return self.prompt

    def body(self, text: str = TALE, *, stream: bool = True, **sampling: Any) -> dict[str, Any]:
        """The JSON of a request."""
        if self.prompt == "text_input":
            whole = {} if stream else {"exclude_input_in_output": True}
            return {"text_input": text, "stream": stream, **whole, "parameters": sampling}
        asked = [{"role": "user", "content": text}] if self.prompt == "messages" else text
        return {self.prompt: asked, "stream": stream, **sampling}


GENERATE = Door("/v2/models/llama/generate_stream", "text_input")
CHAT = Door("/v1/chat/completions", "messages")
COMPLETIONS = Door("/v1/completions", "prompt")
DOORS = (GENERATE, CHAT, COMPLETIONS)


def message(text: str = TALE, request_id: str = "", **sampling: Any) -> Any:
    """The message of ModelStreamInfer for a stream of text."""
    found = streamed(text, **sampling).message
    found.id = request_id
    return found


def texts(body: bytes) -> Iterator[str]:
    """The text of each event, whose bytes are UTF-8 and JSON; AssertionError for an error."""
    for line in body.decode().splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            event = json.loads(data)
            assert "error" not in event, event
            yield from _texts(event)


def _texts(event: Mapping[str, Any]) -> Iterator[str]:
    if "text_output" in event:
        yield event["text_output"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or choice.get("message") or choice
        yield delta.get("content") or delta.get("text") or ""
