"""Streams of texts from the model `story`, each compared with that of an undisturbed run."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.serving import WAIT_SECS, Serving
from tests.telling import conversation, told

TOKENS, FEW_TOKENS, DELAY_US = 100, 40, 50_000
STREAMS = 50
GENERATE = "/v2/models/story/generate_stream"
CONTINUING = {"delay_us": DELAY_US, "continue_tries": 1}
"""Parameters of the model, behind the configuration of `telling`."""


class Story:
    """One stream of a text: by `generate_stream`, or a conversation of OpenAI's API."""

    def __init__(self, number: int, tokens: int = TOKENS) -> None:
        self.text = ""
        self.last: dict[str, Any] = {}
        self.has_begun = asyncio.Event()
        self._is_chat = number % 2 == 1
        prompt = f"story {number}:"
        self.body: dict[str, Any] = {"stream": True, "max_tokens": tokens}
        if self._is_chat:
            messages = [{"role": "user", "content": prompt}]
            self.body |= {"model": "story", "messages": messages}
            prompt = conversation(self.body)
        else:
            self.body |= {"text_input": prompt}
        self.expected = told(prompt, tokens)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end."""
        path = "/v1/chat/completions" if self._is_chat else GENERATE
        async with client.stream("POST", path, json=self.body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, event: dict[str, Any]) -> None:
        """Add the text of an event."""
        self.last = event
        if self.text:
            self.has_begun.set()
        if self._is_chat and "choices" in event:
            self.text += event["choices"][0]["delta"].get("content", "")
        else:
            self.text += event.get("text_output", "")


async def tell(
    server: Serving, count: int, disturb: Callable[[], object], tokens: int = TOKENS
) -> list[Story]:
    """Read stories, and disturb all of them in the middle."""
    stories = [Story(number, tokens) for number in range(count)]
    limits = httpx.Limits(max_connections=count)
    async with (
        httpx.AsyncClient(base_url=server.http, timeout=WAIT_SECS, limits=limits) as client,
        asyncio.timeout(WAIT_SECS),
    ):
        reading = [asyncio.ensure_future(each.read(client)) for each in stories]
        for each in stories:
            await each.has_begun.wait()
        disturb()
        await asyncio.gather(*reading)
    return stories


def check_whole(stories: list[Story]) -> int:
    """Check that all texts are those of an undisturbed run; the number of continued ones."""
    for each in stories:
        assert each.text == each.expected, each.last
    return sum("continued" in each.last for each in stories)
